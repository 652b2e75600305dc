"""RL tasks: problems to train on, a held-out set that shares no prompt with them, and the reward of an answer."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import random
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from miles_sc.trainer.rewards import RULES, answer_rule

# A data set is made anew, under another seed, every so many problems: some generate all of theirs at once.
CHUNK = 500
HELD_OUT_ONE_IN = 10
# Draws without a new held-out problem after which a small task counts as exhausted.
GIVE_UP = 500 * HELD_OUT_ONE_IN
LIST_TASKS = "miles-sc tasks"


@dataclass(frozen=True)
class Problem:
    """One prompt; ``answer`` is empty where only a verifier can tell, ``entry`` is what the verifier reads."""

    index: int
    prompt: str
    answer: str
    entry: Mapping[str, Any] = field(repr=False, compare=False)


class ProblemSource(Protocol):
    """Where problems come from; ``verify`` is the source's own reward, None where the user has to choose a rule."""

    verify: Callable[[Problem, str], float] | None

    def train(self, index: int) -> Problem: ...

    def held_out(self, count: int) -> list[Problem]: ...


class Task:
    """A source of problems and a reward. Pickles; equal arguments give equal problems in every process."""

    def __init__(self, *, name: str, source: ProblemSource, reward: Callable[[Problem, str], float], held_out: int):
        self.name = name
        self._source = source
        self._reward = reward
        self._held_out = held_out

    def train(self, index: int) -> Problem:
        """Training problem number ``index`` >= 0; there is one for every index."""
        if index < 0:
            raise ValueError(f"training problem index must be >= 0, got {index}")
        return self._source.train(index)

    def held_out(self) -> list[Problem]:
        """The evaluation set: the same for every seed, and no prompt of it is ever a training prompt."""
        return self._source.held_out(self._held_out)

    def reward(self, problem: Problem, text: str) -> float:
        """Reward of the model's text. Where it marks its answer as ``<answer>...</answer>``, only that is judged."""
        return self._reward(problem, _marked_answer(text))


def load_task(
    *,
    task: str | None,
    prompt_data: str | None,
    input_key: str = "input",
    label_key: str = "label",
    rm_type: str | None,
    seed: int,
    held_out: int,
    task_options: Mapping[str, Any] | None = None,
) -> Task:
    """The task that the command line names, by exactly one of ``task`` (reasoning-gym) and ``prompt_data`` (JSONL).

    ``rm_type`` None means the data set's own verifier; a JSONL file has none and needs ``exact``, ``number`` or
    ``contains``. ``constant:<value>`` works on both. ``seed`` moves the training order, never the split. Arguments that
    do not fit each other, unknown names and malformed lines are ValueErrors.
    """
    if (task is None) == (prompt_data is None):
        raise ValueError(f"give exactly one of --task and --prompt-data, got {task!r} and {prompt_data!r}")
    if held_out < 1:
        raise ValueError(f"the held-out set needs at least 1 problem, got {held_out}")
    if task is not None:
        source: ProblemSource = ProceduralProblems(task, seed=seed, options=task_options or {})
    else:
        if task_options:
            raise ValueError(f"--task-option {', '.join(task_options)} needs --task; --prompt-data has no options")
        source = JsonlProblems(Path(prompt_data), input_key, label_key, rm_type, seed=seed, held_out=held_out)
    name = " ".join([task or str(prompt_data), *(f"{key}={value}" for key, value in (task_options or {}).items())])
    return Task(name=name, source=source, reward=_reward(source, rm_type), held_out=held_out)


def task_from_args(args: Namespace, *, seed: int) -> Task:
    """:func:`load_task` on the flags of ``add_task_arguments``."""
    return load_task(
        task=args.task,
        prompt_data=args.prompt_data,
        input_key=args.input_key,
        label_key=args.label_key,
        rm_type=args.rm_type,
        seed=seed,
        held_out=args.held_out,
        task_options=parse_task_options(args.task_option),
    )


def task_names() -> list[str]:
    """Every name that ``--task`` accepts."""
    return sorted(_data_sets())


def parse_task_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``["max_terms=3", "allow_negation=true"]`` as a dict; values that read as int, float, bool or list become it."""
    options = {}
    for pair in pairs:
        key, separator, raw = pair.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"--task-option {pair!r} is not key=value, for example max_terms=3")
        if key.strip() in options:
            raise ValueError(f"--task-option {key.strip()!r} is given twice; keep one")
        options[key.strip()] = _option_value(raw.strip())
    return options


class RuleReward:
    """An ``--rm-type`` rule as a reward; a class, so that a task pickles."""

    def __init__(self, rm_type: str):
        self._rm_type = rm_type
        answer_rule(rm_type)

    def __call__(self, problem: Problem, text: str) -> float:
        return answer_rule(self._rm_type)(problem.answer, text)


class ProceduralProblems:
    """A reasoning-gym data set as an endless stream of problems.

    A prompt is held out when its hash falls into one residue class of ten, whatever the seed: a model warmed up under
    another seed, or in another run, has not seen the evaluation set either, and prompts that repeat cannot leak.
    """

    def __init__(self, name: str, *, seed: int, options: Mapping[str, Any]):
        self._name, self._seed, self._options = name, seed, dict(options)
        _check_options(name, self._options)
        self._chunks: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._check_verifier()

    def train(self, index: int) -> Problem:
        for entry in self._draws(index):
            if not _is_held_out(entry["question"]):
                return _problem(index, entry)
        raise ValueError(f"--task {self._name}: no problem to train on at index {index}; widen it with --task-option")

    def held_out(self, count: int) -> list[Problem]:
        found: dict[str, Problem] = {}
        position = last_new = 0
        while len(found) < count:
            if position - last_new > GIVE_UP:
                raise ValueError(
                    f"--task {self._name}: {count} held-out problems asked, only {len(found)} distinct ones exist; "
                    f"ask for at most {len(found)}, or widen the task with --task-option"
                )
            entry = self._entry("held-out", position)
            if _is_held_out(entry["question"]) and entry["question"] not in found:
                found[entry["question"]] = _problem(len(found), entry)
                last_new = position
            position += 1
        return list(found.values())

    def verify(self, problem: Problem, text: str) -> float:
        """The data set's own score; text that its verifier cannot parse, whatever it raises then, earns 0."""
        try:
            return self._score(problem.entry, text.strip())
        except Exception:
            return 0.0

    def _check_verifier(self) -> None:
        # verify() takes any exception for bad text, so a verifier that is broken itself has to show here.
        entry = self._entry("train 0", 0)
        if isinstance(entry.get("answer"), str):
            self._score(entry, entry["answer"])

    def _score(self, entry: Mapping[str, Any], text: str) -> float:
        # Any instance of the data set scores: it reads only the entry and the options.
        return float(self._data_set("train 0", 0).score_answer(answer=text, entry=entry))

    def _draws(self, index: int) -> Iterator[Mapping[str, Any]]:
        # Spares come from the chunk of the same number, so that one more data set serves all of its rejections.
        yield self._entry(f"train {self._seed}", index)
        first = index - index % CHUNK
        for attempt in range(64):
            yield self._entry(f"spare {self._seed}", first + (index + 37 * attempt) % CHUNK)

    def _entry(self, stream: str, position: int) -> Mapping[str, Any]:
        chunk, row = divmod(position, CHUNK)
        data_set = self._data_set(stream, chunk)
        with _global_random(f"{stream} {position}"):
            return data_set[row]

    def _data_set(self, stream: str, chunk: int) -> Any:
        key = (stream, chunk)
        if key not in self._chunks:
            seed = _stable_hash(f"{stream} {chunk}") % 2**31
            self._chunks[key] = _create_data_set(self._name, self._options, seed=seed)
        self._chunks.move_to_end(key)
        while len(self._chunks) > 8:
            self._chunks.popitem(last=False)
        return self._chunks[key]

    def __getstate__(self) -> dict[str, Any]:
        # Data sets hold lambdas; they are made again where the task arrives.
        return self.__dict__ | {"_chunks": OrderedDict()}


class JsonlProblems:
    """Prompts and reference answers from a JSONL file; training cycles through it, in a new order each epoch."""

    verify = None

    def __init__(self, path: Path, input_key: str, label_key: str, rm_type: str | None, *, seed: int, held_out: int):
        if rm_type is None:
            raise ValueError(f"--prompt-data {path} needs --rm-type: one of {', '.join(RULES)} or constant:<value>")
        problems = list(_read_jsonl(path, input_key, label_key, rm_type))
        # Ordered by hash: a shuffle that does not depend on the seed and puts equal prompts side by side.
        ordered = sorted(problems, key=lambda problem: (_stable_hash(problem.prompt), problem.index))
        self._held_out = ordered[-held_out:]
        unseen = {problem.prompt for problem in self._held_out}
        self._train = [problem for problem in problems if problem.prompt not in unseen]
        if not self._train:
            distinct = len({problem.prompt for problem in problems})
            raise ValueError(
                f"--prompt-data {path}: {len(problems)} lines with {distinct} distinct prompts leave none to train on "
                f"beside {held_out} held out; add lines or hold out fewer"
            )
        self._seed = seed
        self._shuffled: tuple[int, list[Problem]] = (-1, [])

    def train(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._train))
        if self._shuffled[0] != epoch:
            order = list(self._train)
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._shuffled = (epoch, order)
        return dataclasses.replace(self._shuffled[1][position], index=index)

    def held_out(self, count: int) -> list[Problem]:
        return self._held_out[-count:]


def _reward(source: ProblemSource, rm_type: str | None) -> Callable[[Problem, str], float]:
    return RuleReward(rm_type) if rm_type is not None else source.verify


def _read_jsonl(path: Path, input_key: str, label_key: str, rm_type: str) -> Iterator[Problem]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-data {path} cannot be read: {error}; give a UTF-8 JSONL file") from error
    if not any(line.strip() for line in lines):
        keys = f"{input_key!r} and {label_key!r}"
        raise ValueError(f"--prompt-data {path} is empty; write one JSON object with {keys} per line")
    rule = answer_rule(rm_type)
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            raise ValueError(f"{where}: blank line; remove it")
        prompt, answer = _parse_line(where, line, input_key, label_key)
        try:
            rule(answer, answer)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; change the label or --rm-type {rm_type}") from error
        yield Problem(index=number - 1, prompt=prompt, answer=answer, entry={})


def _parse_line(where: str, line: str, input_key: str, label_key: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
        raise ValueError(f"{where}: not JSON ({problem}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {line.strip()!r} is no JSON object; write one with {input_key!r} and {label_key!r}")
    for key, flag in ((input_key, "--input-key"), (label_key, "--label-key")):
        if key not in record:
            raise ValueError(f"{where}: no key {key!r} among {sorted(record)}; add it or set {flag}")
    prompt, label = record[input_key], record[label_key]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: {input_key!r} must be a non-empty string, got {prompt!r}")
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        raise ValueError(f"{where}: {label_key!r} must be a non-empty string or a number, got {label!r}")
    return prompt, str(label)


def _data_sets() -> Mapping[str, Any]:
    # Imported on use: it takes seconds, and a JSONL task does not need it.
    try:
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ValueError(f"--task needs reasoning-gym ({error}); pip install 'miles-sc[train]'") from error
    # A composite is a list of other data sets, which key=value options cannot describe.
    return {name: classes for name, classes in DATASETS.items() if name != "composite"}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    data_sets = _data_sets()
    if name not in data_sets:
        close = difflib.get_close_matches(name, data_sets, n=5, cutoff=0.5)
        meant = f"did you mean {', '.join(close)}? " if close else ""
        raise ValueError(f"--task {name!r} is no reasoning-gym data set; {meant}all {len(data_sets)}: {LIST_TASKS}")
    valid = {f.name for f in dataclasses.fields(data_sets[name][1])} - {"seed", "size"}
    for key in options:
        if key not in valid:
            raise ValueError(f"--task-option {key!r} is no option of {name}; choose from {', '.join(sorted(valid))}")
    try:
        _create_data_set(name, options, seed=0)
    except Exception as error:
        raise ValueError(f"--task {name} refuses the options {dict(options)}: {error}") from error


def _create_data_set(name: str, options: Mapping[str, Any], *, seed: int) -> Any:
    data_set_class, config_class = _data_sets()[name]
    config = config_class(**options, seed=seed, size=CHUNK)
    if hasattr(config, "validate"):
        config.validate()
    return data_set_class(config=config)


def _problem(index: int, entry: Mapping[str, Any]) -> Problem:
    answer = entry.get("answer")
    return Problem(index=index, prompt=entry["question"], answer="" if answer is None else str(answer), entry=entry)


def _is_held_out(prompt: str) -> bool:
    return _stable_hash(prompt) % HELD_OUT_ONE_IN == 0


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@contextlib.contextmanager
def _global_random(seed: str) -> Iterator[None]:
    """Some generators also draw from the global ``random``: give it a state of ours, then the caller's back."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _marked_answer(text: str) -> str:
    _, opening, rest = text.rpartition("<answer>")
    marked, closing, _ = rest.partition("</answer>")
    return marked if opening and closing else text


def _option_value(raw: str) -> Any:
    literals = {"true": True, "false": False, "none": None}
    if raw.lower() in literals:
        return literals[raw.lower()]
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        return raw
