"""A stand-in host entered: what is wrapped and when, what keeps everything as it was, and who is told."""

import asyncio
import functools
import sys
from types import FunctionType, SimpleNamespace

import pytest
import wrapt

from miles_sc.hosts import activation as machinery
from miles_sc.hosts.activation import activate, activation, deactivate
from tests.hosts.stand_in_host import stand_in

POLICY = SimpleNamespace(loss_type="policy_loss")
PARAMETERS = {"parameters": ("args",)}


@pytest.fixture
def host(tmp_path):
    with stand_in(tmp_path) as host:
        yield host


def doubled(wrapped, instance, args, kwargs):
    """Of a number twice as much, of a function one that gives twice as much."""
    result = wrapped(*args, **kwargs)
    return (lambda *given: 2 * result(*given)) if callable(result) else 2 * result


def is_plain(function) -> bool:
    return type(function) is FunctionType


# --- what is wrapped, and when


def test_a_module_is_wrapped_when_it_is_imported_and_so_are_names_bound_from_it(host):
    active = host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS))
    assert active.installed == [] and not active.faults
    training = host.load("training")  # it binds the name by `from ... import`
    assert active.installed == [f"{host.package}.losses.get_loss_function"]
    assert training.train(POLICY, 3) == 12
    assert training.get_loss_function is host.load("losses").get_loss_function
    assert is_plain(host.load("losses").policy_loss)


def test_a_name_is_wrapped_where_it_was_imported_and_nowhere_else(host):
    async def marked(wrapped, instance, args, kwargs):
        return {**await wrapped(*args, **kwargs), "marked": True}

    host.enter(host.seam("asking.post", wrap=marked, within="generate", rests_on=("post", "url")))
    answer = asyncio.run(host.load("asking").generate(SimpleNamespace(url="u"), "s"))
    assert answer == {"url": "u", "prompt": "s", "marked": True}
    assert is_plain(host.load("net").post)


def test_values_and_methods_of_every_kind(host):
    calls = []

    def noted(wrapped, instance, args, kwargs):
        calls.append((instance, args, kwargs))
        return wrapped(*args, **kwargs)

    host.enter(
        host.seam("work.TABLE", replace=lambda table: {**table, "ours": "float32"}),
        host.seam("kinds.Sample.strip", parameters=("self", "n"), wrap=noted),
        host.seam("kinds.Sample.join", parameters=("first",), wrap=noted),
        host.seam("kinds.Sample.of", parameters=("cls",), wrap=noted),
    )
    assert host.load("work").TABLE == {"tokens": "int32", "ours": "float32"}
    kinds = host.load("kinds")
    sample = kinds.Longer.of(1, 2)
    assert type(sample) is kinds.Longer and sample.tokens == (1, 2)
    assert kinds.Sample.join(sample, sample).tokens == (1, 2, 1, 2)
    assert sample.strip(n=1) == kinds.Sample((1,))
    assert calls == [(kinds.Longer, (1, 2), {}), (None, (sample, sample), {}), (sample, (), {"n": 1})]


def test_the_package_itself_has_seams_too(host):
    host.enter(machinery.Seam(host.package, "greet", "", parameters=("name",), wrap=doubled))
    __import__(host.package)
    assert sys.modules[host.package].greet("you") == "hello youhello you"


def test_a_module_imported_before_is_wrapped_at_once(host):
    losses, training = host.load("losses"), host.load("training")
    active = host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS))
    assert active.installed and losses.get_loss_function(POLICY)(3) == 12
    assert training.train(POLICY, 3) == 6  # what was bound before cannot be reached


def test_seams_that_are_only_checked_are_left_alone(host):
    active = host.enter(host.seam("losses.get_loss_function", **PARAMETERS))
    assert is_plain(host.load("losses").get_loss_function)
    assert not active.faults and not active.installed


def test_a_host_is_activated_once_and_found_by_name(host, monkeypatch):
    table = host.table(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS))
    monkeypatch.setattr(machinery, "known_host", lambda package: table)
    first = activate(host.package)
    assert activate(host.package) is first is activation(host.package)
    assert host.load("training").train(POLICY, 3) == 12
    deactivate(host.package)
    assert activation(host.package) is None
    deactivate(host.package)


# --- nothing, where something is not as it must be


def test_one_seam_at_fault_leaves_everything_as_it_was(host):
    active = host.enter(
        host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS),
        host.seam("losses.policy_loss", parameters=("x",), wrap=doubled, guards=True),
        host.seam("work.TABLE", replace=lambda table: {}),
        host.seam("kinds.Sample.gone", loses="rows no longer match tokens", wrap=doubled),
    )
    assert host.load("training").train(POLICY, 3) == 6
    assert is_plain(host.load("losses").get_loss_function) and host.load("work").TABLE == {"tokens": "int32"}
    assert active.installed == [] and len(active.faults) == 1


def test_whoever_asks_is_told_version_seams_consequences_and_remedy(host):
    active = host.enter(
        host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS),
        host.seam("losses.policy_loss", parameters=("y",), loses="the loss is lost"),
        host.seam("kinds.Sample.gone", loses="rows no longer match tokens"),
    )
    with pytest.raises(ValueError) as raised:
        active.require()
    assert str(raised.value).splitlines() == [
        f"score centering cannot enter this {host.package} (version unknown, in {host.directory}): 2 of its 3 seams are not as "
        "this plugin knows them, so none is used:",
        f"  {host.package}.losses.policy_loss: its parameters are (x) and were (y, ...); without it the loss is lost",
        f"  {host.package}.kinds.Sample.gone: there is no such attribute; without it rows no longer match tokens",
        f"install a miles_sc that knows this {host.package}, or a {host.package} that docs/hosts.md lists",
    ]


def test_the_version_is_that_of_the_hosts_distribution(host):
    metadata = host.folder / f"{host.package}-7.5.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {host.package}\nVersion: 7.5\n")
    assert host.enter().version == f"version 7.5, in {host.directory}"


def test_nobody_is_told_where_all_is_well(host):
    host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS)).require()


def test_what_the_source_promises_and_the_module_lacks_is_a_fault_and_no_error(host):
    active = host.enter(
        host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS),
        host.seam("work.fleeting", wrap=doubled, guards=True),
    )
    host.load("training")
    host.load("work")
    assert [fault.seam.attribute for fault in active.faults] == ["fleeting"]


def test_a_fault_that_shows_late_undoes_what_was_done_but_for_the_guards(host):
    """A worker that imports knows nothing of the run yet; the guard stops it when it does. One imported later is one still."""
    losses = host.load("losses")
    active = host.enter(
        host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS),
        host.seam("losses.policy_loss", parameters=("x",), wrap=doubled, guards=True),
        host.seam("work.plain", parameters=("value",), wrap=doubled),
        host.seam("kinds.Sample.strip", parameters=("self", "n"), wrap=doubled),
        host.seam("kinds.Sample.of", parameters=("cls",), wrap=doubled, guards=True),
    )
    assert not is_plain(losses.get_loss_function)
    (host.directory / "work.py").write_text("from json import dumps as plain\n")
    host.load("work")
    assert len(active.faults) == 1 and is_plain(losses.get_loss_function) and not is_plain(losses.policy_loss)
    kinds = host.load("kinds")
    assert is_plain(kinds.Sample.strip)
    guards = [f"{host.package}.losses.policy_loss", f"{host.package}.kinds.Sample.of"]
    assert active.installed == guards
    active.undo()
    assert is_plain(losses.policy_loss) and not active.installed


def test_a_guard_reports_also_where_it_is_itself_at_fault(host):
    """Another plugin was there first; ours goes around it, to say so where a run asks."""

    def asks(wrapped, instance, args, kwargs):
        activation(host.package).require()

    wrapt.register_post_import_hook(lambda module: with_wrapt(module, "get_loss_function"), f"{host.package}.losses")
    host.enter(host.seam("losses.get_loss_function", wrap=asks, guards=True, **PARAMETERS))
    with pytest.raises(ValueError, match=f"losses.get_loss_function: {__name__} has decorated, wrapped or replaced it before us"):
        host.load("training").train(POLICY, 3)


def test_a_fault_that_shows_late_stops_a_run_that_has_asked(host):
    active = host.enter(host.seam("work.plain", parameters=("value",), wrap=doubled))
    active.require()
    (host.directory / "work.py").write_text("from json import dumps as plain\n")
    with pytest.raises(ValueError, match=f"{host.package}.work.plain: json has decorated, wrapped or replaced it"):
        host.load("work")


@pytest.mark.parametrize(
    "words",
    [
        "--loss-type score_centering",
        "--loss-type=score_centering",
        "--score-centering-is tis",
        "--score-centering-observe",
        "--rollout-top-logprobs-num 8",
        "--rollout-top-logprobs-num=8",
    ],
)
def test_our_flags_on_a_host_that_we_cannot_enter_are_explained_before_its_parser_sees_them(host, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch-size", "4", *words.split()])
    host.enter(host.seam("losses.gone", wrap=doubled))
    with pytest.raises(ValueError, match=f"cannot enter this {host.package}.*\n.*losses.gone: there is no such attribute"):
        host.load("arguments")


def test_our_flags_are_explained_also_where_another_plugin_has_the_command_line(host, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--score-centering-observe"])
    wrapt.register_post_import_hook(lambda module: with_wrapt(module, "validate_args"), f"{host.package}.arguments")
    host.enter(host.seam("arguments.validate_args", wrap=doubled, **PARAMETERS))
    with pytest.raises(ValueError, match=f"validate_args: {__name__} has decorated, wrapped or replaced it before us"):
        host.load("arguments")


@pytest.mark.parametrize(
    "words", ["", "--loss-type policy_loss", "--note score_centering --rollout-top-k 5", "--save runs/score_centering"]
)
def test_other_flags_there_are_the_hosts_affair(host, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    host.enter(host.seam("losses.gone", wrap=doubled))
    assert host.load("arguments").parse_args


# --- hosts that we stay out of


def test_a_stranger_of_the_same_name_is_ignored(host):
    table = host.table(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS), entry=f"{host.package}.train.loop")
    assert machinery.enter(table, [str(host.directory)]) is None and activation(host.package) is None
    assert host.load("training").train(POLICY, 3) == 6


def test_a_package_that_is_not_there_is_ignored(monkeypatch):
    monkeypatch.setattr(machinery, "known_host", lambda package: machinery.Host(package, f"{package}.arguments", ()))
    assert activate("no_such_package_of_ours") is None


def own(host) -> dict:
    """What a host is known by that has the loss itself, and the seams that a takeover needs."""
    gone = (host.seam("losses.gone", wrap=doubled),)  # another layout than this host's
    takeover = (host.seam("losses.policy_loss", parameters=("x",), wrap=doubled),)
    return {"own_loss": "sft_loss", "takeover": (gone, takeover)}


def test_a_host_with_the_loss_itself_has_the_seams_of_a_takeover_only(host):
    active = host.enter(host.seam("losses.gone", wrap=doubled), **own(host))
    losses = host.load("losses")
    assert active.own_loss and not active.faults
    assert is_plain(losses.get_loss_function) and losses.policy_loss(3) == 12


@pytest.mark.parametrize("flag", ["--score-centering-is", "--score-centering-tis-clip"])
def test_a_host_with_flags_of_ours_has_the_loss_itself(host, flag):
    """Its choices of a loss may stand in another module than its command line."""
    with (host.directory / "arguments.py").open("a") as file:
        file.write(f'FLAG = "{flag}"\n')
    known = {**own(host), "own_loss": "a_loss_of_nobody"}
    assert host.enter(host.seam("losses.gone", wrap=doubled), **known).own_loss


def test_a_host_with_another_flag_of_that_name_is_not_entered(host, monkeypatch):
    """Two of one name break its parser, also where nobody asks for ours."""
    with (host.directory / "arguments.py").open("a") as file:
        file.write('FLAG = "--rollout-top-logprobs-num"\n')
    active = host.enter_command_line()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert host.load("arguments").parse_args() and not active.installed
    with pytest.raises(
        ValueError, match="it would be given --rollout-top-logprobs-num, a flag that the host has already; without it"
    ):
        active.require()


def test_a_host_that_does_not_mention_it_has_not_the_loss_itself(host):
    known = {**own(host), "own_loss": "a_loss_of_nobody"}
    active = host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS), **known)
    assert not active.own_loss and active.seams == active.host.seams


@pytest.mark.parametrize(
    ("words", "refused"),
    [("--loss-type score_centering", False), ("--loss-type score_centering --score-centering-provider miles_sc", True)],
)
def test_flags_of_a_hosts_own_loss_are_refused_only_for_a_takeover(host, monkeypatch, words, refused):
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    host.enter(**{**own(host), "takeover": ((host.seam("losses.gone", wrap=doubled),),)})
    if refused:
        with pytest.raises(ValueError, match="losses.gone"):
            host.load("arguments")
    else:
        host.load("arguments")


# --- two plugins in one place


def with_wrapt(module, name):
    wrapt.wrap_function_wrapper(module, name, doubled)


def with_functools(module, name):
    function = getattr(module, name)
    setattr(module, name, functools.wraps(function)(lambda *args: 2 * function(*args)))


def with_a_replacement(module, name):
    setattr(module, name, lambda value: -value)


def with_a_callable(module, name):
    setattr(module, name, functools.partial(getattr(module, name)))


OTHERS = [with_wrapt, with_functools, with_a_replacement, with_a_callable]


@pytest.mark.parametrize("name", ["plain", "here", "elsewhere"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_plugin_that_was_there_first_is_a_fault_that_names_it(host, other, name):
    wrapt.register_post_import_hook(lambda module: other(module, name), f"{host.package}.work")
    active = host.enter(host.seam(f"work.{name}", parameters=("value",), wrap=doubled))
    before = getattr(host.load("work"), name)
    assert active.installed == [] and getattr(sys.modules[f"{host.package}.work"], name) is before
    whose = "functools" if other is with_a_callable else __name__
    assert [fault.found for fault in active.faults] == [
        f"{whose} has decorated, wrapped or replaced it before us ({type(before).__name__}): where that is another "
        "plugin, uninstall one of the two"
    ]


@pytest.mark.parametrize(("attribute", "other"), [("Sample.strip", with_wrapt), ("Sample.join", with_functools)])
def test_a_method_that_another_plugin_has_is_a_fault(host, attribute, other):
    wrapt.register_post_import_hook(lambda module: other(module.Sample, attribute.split(".")[1]), f"{host.package}.kinds")
    parameters = {"Sample.strip": ("self",), "Sample.join": ("first",)}[attribute]
    active = host.enter(host.seam(f"kinds.{attribute}", parameters=parameters, wrap=doubled))
    host.load("kinds")
    assert len(active.faults) == 1 and __name__ in active.faults[0].found


@pytest.mark.parametrize("name", ["plain", "here", "elsewhere", "both", "unnamed"])
def test_a_hosts_own_decorators_are_none(host, name):
    active = host.enter(host.seam(f"work.{name}", parameters=("value",), wrap=doubled))
    expected = {"plain": 4, "here": 6, "elsewhere": 4, "both": 6, "unnamed": 4}[name]
    assert getattr(host.load("work"), name)(1) == expected
    assert not active.faults


# --- and back


def test_undo_puts_everything_back(host):
    work, kinds, losses = host.load("work"), host.load("kinds"), host.load("losses")
    owners = (work, kinds, losses, kinds.Sample)
    before = [dict(vars(owner)) for owner in owners]
    active = host.enter(
        host.seam("work.TABLE", replace=dict),
        host.seam("work.both", parameters=("value",), wrap=doubled),
        host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS),
        host.seam("kinds.Sample", replace=lambda sample: type("Other", (sample,), {"strip": lambda self, n: None})),
        host.seam("kinds.Sample.strip", parameters=("self", "n"), wrap=doubled),
        host.seam("kinds.Longer", replace=lambda longer: None),
    )
    assert len(active.installed) == 6
    active.undo()
    for owner, attributes in zip(owners, before, strict=True):
        assert vars(owner).keys() == attributes.keys()
        assert all(vars(owner)[name] is value for name, value in attributes.items())
    assert not active.installed


def test_undo_puts_static_and_class_methods_back(host):
    kinds = host.load("kinds")
    before = dict(vars(kinds.Sample))
    active = host.enter(
        host.seam("kinds.Sample.strip", parameters=("self",), wrap=doubled),
        host.seam("kinds.Sample.join", parameters=("first",), wrap=doubled),
        host.seam("kinds.Sample.of", parameters=("cls",), wrap=doubled),
    )
    assert len(active.installed) == 3
    active.undo()
    assert all(vars(kinds.Sample)[name] is value for name, value in before.items())
    assert kinds.Longer.of(1, 2).strip(1).tokens == (1,)


def test_modules_imported_after_undo_are_left_alone(host):
    active = host.enter(host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS), host.seam("work.plain", wrap=doubled))
    host.load("losses")
    active.undo()
    assert is_plain(host.load("work").plain) and host.load("training").train(POLICY, 3) == 6


def test_a_host_that_was_left_says_nothing_of_its_faults(host, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--score-centering-observe"])
    host.enter(host.seam("losses.gone", wrap=doubled))
    deactivate(host.package)
    assert host.load("arguments").parse_args


def test_a_host_can_be_entered_again(host):
    seam = host.seam("losses.get_loss_function", wrap=doubled, **PARAMETERS)
    host.enter(seam)
    losses = host.load("losses")
    deactivate(host.package)
    active = host.enter(seam)
    assert not active.faults and losses.get_loss_function(POLICY)(3) == 12
    assert is_plain(losses.get_loss_function.__wrapped__)
