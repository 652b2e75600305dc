"""An SGLang engine behind HTTP. Importing this package imports no HTTP client."""
