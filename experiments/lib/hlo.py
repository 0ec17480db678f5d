"""Parses the HLO text of a compiled program, to count kernels and collectives in a round.

`Module.rounds` finds the loop over rounds; drafting has loops over drafted tokens inside it. The metadata of
an instruction has its stage of the round: `specjax.round` names the stages with `jax.named_scope`.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# These launch no kernel: names, views, control flow. Nor do the ends of asynchronous instructions.
_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id "
    "replica-id opt-barrier add-dependency".split()
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "s4": 1, "u4": 1}
_SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|true_computation|false_computation|calls)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      opcode: such as "fusion" or "all-reduce"; the start of an asynchronous one stands for the whole.
      num_bytes: size of its result.
      called: computations that it runs; empty for a fusion, which is one kernel.
      op_name: its origin in the program, as in "jit(generate)/while/body/draft/...".
      target: target of a custom call.
    """

    opcode: str
    num_bytes: int
    called: tuple[str, ...]
    op_name: str
    target: str

    @property
    def is_kernel(self) -> bool:
        """Whether a GPU launches a kernel for it."""
        return self.opcode not in _NO_KERNEL and not self.opcode.endswith(("-done", "-update"))

    @property
    def is_collective(self) -> bool:
        """Whether it exchanges data between devices."""
        return self.opcode in COLLECTIVES

    def is_in(self, stage: str) -> bool:
        """Whether it belongs to a stage of the round."""
        return f"/{stage}/" in self.op_name


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop: the instructions of one iteration, and the loops inside it.

    Attributes:
      instructions: of body and condition, without inner loops; the longest branch of a `lax.cond`.
      inner: loops inside it.
      op_name: that of the loop itself.
    """

    instructions: tuple[Instruction, ...]
    inner: tuple["Loop", ...]
    op_name: str

    def is_in(self, stage: str) -> bool:
        """Whether it belongs to a stage of the round."""
        return f"/{stage}/" in self.op_name

    @property
    def num_kernels(self) -> int:
        """Kernels per iteration, without those of inner loops."""
        return sum(one.is_kernel for one in self.instructions)

    def everything(self) -> Iterator[Instruction]:
        """Yields its instructions and those of inner loops, each once."""
        yield from self.instructions
        for loop in self.inner:
            yield from loop.everything()


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: the instructions of each computation, and the name of the entry."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Returns the program with the text `compiled.as_text()`."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = "", ""
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" ") and "->" in line:
                is_entry = line.startswith("ENTRY ")
                current = line.removeprefix("ENTRY ").split(" ", 1)[0].removeprefix("%")
                entry = current if is_entry else entry
                computations[current] = []
            elif line.startswith(" ") and " = " in line and current:
                computations[current].append(_instruction(line))
        return cls({name: tuple(found) for name, found in computations.items()}, entry)

    def rounds(self, program: str) -> Loop:
        """Returns the loop over rounds: "sampled" or "greedy"; a request of concrete options has one of them.

        Raises:
          ValueError: the compiled program has no such loop.
        """
        for loop in self._run(self.entry)[1]:
            if f"/{program}/" in loop.op_name:
                return loop
        raise ValueError(
            f"the text must have a loop of the {program} program, as `specjax.decode.run` compiles it"
        )

    def _run(self, name: str) -> tuple[list[Instruction], list[Loop]]:
        """Returns the instructions that a computation runs, and its loops."""
        instructions: list[Instruction] = []
        loops: list[Loop] = []
        for one in self.computations[name]:
            instructions.append(one)
            parts = [self._run(called) for called in one.called if called in self.computations]
            if one.opcode == "while":
                inside = [found for part, _ in parts for found in part]
                inner = [loop for _, part in parts for loop in part]
                loops.append(Loop(tuple(inside), tuple(inner), one.op_name))
                continue
            for _, inner in parts:
                loops += inner
            if one.opcode == "conditional" and parts:
                parts = [max(parts, key=lambda part: len(part[0]))]
            for part, _ in parts:
                instructions += part
        return instructions, loops


def draft_and_rest(rounds: Loop) -> tuple[list[Instruction], list[Instruction]]:
    """Returns the instructions of the draft stage, loops included, and those of the rest of a round."""
    draft = [one for one in rounds.instructions if one.is_in("draft")]
    rest = [one for one in rounds.instructions if not one.is_in("draft")]
    for loop in rounds.inner:
        (draft if loop.is_in("draft") else rest).extend(loop.everything())
    return draft, rest


def per_round(rounds: Loop, num_steps: int) -> tuple[int, int]:
    """Returns the kernels per draft step, and per round with `num_steps` draft steps."""
    count = lambda loop: sum(one.is_kernel for one in loop.everything())  # noqa: E731
    per_step = sum(count(loop) for loop in rounds.inner if loop.is_in("draft"))
    others = sum(count(loop) for loop in rounds.inner if not loop.is_in("draft"))
    return per_step, rounds.num_kernels + others + per_step * num_steps


def names(instructions: Iterator[Instruction] | list[Instruction]) -> str:
    """Returns opcodes (or targets of custom calls) with their counts, most frequent first."""
    counts = collections.Counter(one.target or one.opcode for one in instructions)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _instruction(line: str) -> Instruction:
    """Returns the instruction of a line `%name = type opcode(operands), attributes`."""
    _, _, rest = line.partition(" = ")
    end = _end_of_type(rest)
    shape, (opcode, _, _) = rest[:end], rest[end:].strip().partition("(")
    called: tuple[str, ...] = ()
    if opcode != "fusion":
        found = [one or several for one, several in _CALLED.findall(rest[end:])]
        called = tuple(name.strip().removeprefix("%") for text in found for name in text.split(","))
    if opcode not in ("while", "conditional", "call") and not opcode.startswith("async"):
        called = ()  # such as the sum of a reduction, or the comparison of a sort
    op_name = re.search(r'op_name="([^"]*)"', rest)
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    sizes = [_BYTES.get(kind, 1) * _product(dimensions) for kind, dimensions in _SHAPE.findall(shape)]
    # The start of an asynchronous instruction returns its operand with its result.
    num_bytes = max(sizes, default=0) if opcode.endswith("-start") else sum(sizes)
    return Instruction(
        opcode.removesuffix("-start"),
        num_bytes,
        called,
        op_name[1] if op_name else "",
        target[1] if target else "",
    )


def _end_of_type(text: str) -> int:
    """Returns the end of the type at the start of a text; a tuple type contains blanks."""
    if not text.startswith("("):
        return text.index(" ")
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    return len(text)


def _product(dimensions: str) -> int:
    total = 1
    for number in filter(None, dimensions.split(",")):
        total *= int(number)
    return total
