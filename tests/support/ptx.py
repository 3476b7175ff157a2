"""The events of a kernel in their order, read from its PTX."""

from __future__ import annotations

import re
from collections.abc import Sequence

REGISTER = re.compile(r"%[a-z]+\d+")
PARAMETER = re.compile(r"ld\.param\.\S+\s+(?P<to>[^;]*), \[\w+_param_(?P<number>\d+)")
# The first alternative that matches names the event; `address` is what it reads, if anything.
EVENTS = {
    "trigger": re.compile(r"griddepcontrol\.launch_dependents"),
    "wait": re.compile(r"griddepcontrol\.wait"),
    "prefetch": re.compile(r"prefetch\.global\S* \[(?P<address>[^\]]*)\]"),
    "load": re.compile(r"ld\.global\S* .*\[(?P<address>[^\]]*)\]"),
    "copy": re.compile(r"cp\.async\.c[ag]\.shared\.global\S* \[.*?\], \[(?P<address>[^\]]*)\]"),
    "store": re.compile(r"st\.global\S* .*\[(?P<address>[^\]]*)\]"),
    "atomic": re.compile(r"(?:atom|red)\.\S* .*?\[(?P<address>[^\]]*)\]"),
}
END = re.compile(r"^\s*(?:\$L\w+:|(?:@!?%p\d+ )?bra\b)")  # of a basic block


def first_events(ptx: str, arguments: Sequence[str]) -> list[str]:
    """Return the events of the entry block in order, with the pointers that they read or write.

    `arguments` are the names of the kernel's arguments without constants. Equal neighbours are
    listed once: ["trigger", "load weight_ptr", "wait", "load x_ptr"].
    """
    sources: dict[str, set[str]] = {}  # arguments that a register was computed from
    events: list[str] = []
    for line in _entry_block(ptx):
        kind, address = _event(line)
        if kind is not None:
            of = {name for each in REGISTER.findall(address) for name in sources.get(each, ())}
            pointers = sorted(name for name in of if name.endswith("_ptr"))
            event = " ".join([kind, *pointers])
            if not events or events[-1] != event:
                events.append(event)
        _note_sources(line, arguments, sources)
    return events


def atomics(ptx: str) -> list[str]:
    """Return the distinct atomic instructions, such as atom.global.gpu.acq_rel.add.u32."""
    return sorted(set(re.findall(r"\b((?:atom|red)\.\S+)", ptx)))


def count_waits(ptx: str) -> int:
    return len(EVENTS["wait"].findall(ptx))


def _entry_block(ptx: str) -> list[str]:
    lines = ptx[ptx.index("\n{") :].splitlines()
    first = next(i for i, line in enumerate(lines) if "ld.param" in line)
    body = lines[first:]
    # The assembler's line tables name labels that begin no block.
    ends = (i for i, line in enumerate(body) if END.match(line) and "$L__tmp" not in line)
    ends = (i for i in ends if not body[i].lstrip().startswith("$L__func"))
    return body[: next(ends, len(body))]


def _event(line: str) -> tuple[str | None, str]:
    for kind, pattern in EVENTS.items():
        if found := pattern.search(line):
            return kind, found.groupdict().get("address") or ""
    return None, ""


def _note_sources(line: str, arguments: Sequence[str], sources: dict[str, set[str]]) -> None:
    for part in line.split(";"):
        if found := PARAMETER.search(part):
            number = int(found["number"])
            if number < len(arguments):  # behind them are Triton's own
                for register in REGISTER.findall(found["to"]):
                    sources[register] = {arguments[number]}
            continue
        registers = REGISTER.findall(re.sub(r"^\s*@!?%p\d+", "", part))
        if len(registers) > 1:
            first, *rest = registers
            known = [sources.get(register, set()) for register in rest]
            sources[first] = set().union(*known)
