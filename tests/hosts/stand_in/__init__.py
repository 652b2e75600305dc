"""A host in small, for the tests of how a host is entered: a copy of it is imported under a name of its own."""


def greet(name):
    return f"hello {name}"
