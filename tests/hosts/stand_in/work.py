import functools

from .tools import counted, logged

TABLE: dict[str, str] = {"tokens": "int32"}


def _twice(function):
    @functools.wraps(function)
    def inner(value):
        return function(function(value))

    return inner


def plain(value):
    return value + 1


@logged
def elsewhere(value):
    return value + 1


@counted
def unnamed(value):
    return value + 1


@_twice
def here(value):
    return value + 1


@logged
@_twice
def both(value):
    return value + 1


def fleeting(value):
    return value


LENGTH = fleeting(len(TABLE))
del fleeting
