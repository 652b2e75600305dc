"""A wrapped function is still that function: to who inspects it, copies it or carries it to another process."""

import copy
import functools
import inspect
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray import cloudpickle

from tests.hosts.stand_in_host import stand_in

POLICY = SimpleNamespace(loss_type="policy_loss")
PARAMETERS = {"parameters": ("args",)}


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_cloudpickle(value):
    return cloudpickle.loads(cloudpickle.dumps(value))


PICKLERS = (through_pickle, through_cloudpickle)


@pytest.fixture
def host(tmp_path):
    with stand_in(tmp_path) as host:
        yield host


def doubled(wrapped, instance, args, kwargs):
    function = wrapped(*args, **kwargs)
    return lambda x: 2 * function(x)


def test_a_wrapped_function_tells_the_truth(host):
    async def awaited(wrapped, instance, args, kwargs):
        return await wrapped(*args, **kwargs)

    plain = {name: getattr(host.load(module), name) for module, name in (("net", "post"), ("losses", "get_loss_function"))}
    host.enter(
        host.seam("net.post", parameters=("url", "payload"), awaited=True, wrap=awaited),
        host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS),
    )
    for module, name in (("net", "post"), ("losses", "get_loss_function")):
        wrapped = getattr(host.load(module), name)
        assert wrapped is not plain[name]
        assert inspect.signature(wrapped) == inspect.signature(plain[name])
        assert inspect.iscoroutinefunction(wrapped) == inspect.iscoroutinefunction(plain[name]) == (name == "post")
        assert (wrapped.__module__, wrapped.__qualname__) == (plain[name].__module__, name)
        assert inspect.getsource(wrapped) == inspect.getsource(plain[name]) and inspect.unwrap(wrapped) is plain[name]


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, *PICKLERS])
def test_a_wrapped_function_is_copied_and_pickled_as_a_function_is(host, carry):
    host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS))
    function = host.load("losses").get_loss_function
    assert carry(function) is function
    assert carry({"partial": functools.partial(function, POLICY)})["partial"]()(3) == 12


def test_a_pickle_of_a_wrapped_function_can_be_read_without_us(host):
    plain = host.load("losses").get_loss_function
    expected = pickle.dumps(plain), cloudpickle.dumps(plain)
    host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS))
    wrapped = host.load("losses").get_loss_function
    assert wrapped is not plain and (pickle.dumps(wrapped), cloudpickle.dumps(wrapped)) == expected


READER = """
import pickle, sys
from types import SimpleNamespace
from miles_sc.hosts.activation import enter
from miles_sc.hosts.seams import Host, Seam
package, directory = sys.argv[1:]
seam = Seam(f"{package}.losses", "get_loss_function", "", wrap=lambda *_: lambda x: f"wrapped here, of {x}")
enter(Host(package, f"{package}.arguments", (seam,)), [directory])
actor = pickle.load(sys.stdin.buffer)
print(actor().train(SimpleNamespace(loss_type="policy_loss"), 3))
"""


def test_a_class_carried_by_value_names_the_wrapped_functions_that_its_methods_call(host):
    """As Ray exports an actor: what a worker calls is wrapped by the worker's own plugin."""
    host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS))
    names = {"__name__": "__main__", "get_loss_function": host.load("training").get_loss_function}
    exec("class Actor:\n    def train(self, args, x):\n        return get_loss_function(args)(x)", names)
    assert names["Actor"]().train(POLICY, 3) == 12
    path = os.pathsep.join([str(host.folder), *sys.path])
    command = [sys.executable, "-c", READER, host.package, str(host.directory)]
    payload = cloudpickle.dumps(names["Actor"])
    output = subprocess.run(command, input=payload, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=120)
    assert (output.stdout.decode().strip(), output.stderr.decode()) == ("wrapped here, of 3", "")


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, through_pickle])  # by value, cloudpickle carries the plain one
def test_a_name_that_was_imported_is_copied_and_pickled_as_that_of_its_module(host, carry):
    """The function has another home, where it is not wrapped."""
    host.enter(host.seam("asking.post", wrap=doubled, within="generate", rests_on=("post",)))
    asking = host.load("asking")
    assert asking.post is not host.load("net").post
    assert carry(asking.post) is asking.post


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, through_pickle])  # by value, cloudpickle carries the plain one
def test_a_wrapped_method_taken_from_its_class_is_carried_as_that(host, carry):
    host.enter(host.seam("kinds.Sample.strip", parameters=("self", "n"), wrap=lambda wrapped, instance, args, kwargs: instance))
    Sample = host.load("kinds").Sample
    sample = Sample((1, 2))
    assert carry(Sample.strip)(sample, 1) is sample and carry({"method": Sample.strip})["method"](sample, 1) is sample


@pytest.mark.parametrize("carry", [copy.deepcopy, *PICKLERS])
def test_a_wrapped_method_is_carried_with_what_it_is_bound_to(host, carry):
    host.enter(host.seam("kinds.Sample.strip", parameters=("self", "n"), wrap=lambda wrapped, instance, args, kwargs: instance))
    sample = host.load("kinds").Sample((1, 2))
    carried = carry(sample.strip)(1)
    assert carried == sample and carried is not sample
