"""Score centering inside an installed host: tables of seams, checked before any is touched. See docs/hosts.md."""
