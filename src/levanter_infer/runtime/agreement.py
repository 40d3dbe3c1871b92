"""What all processes must have in common before the first launch, and who does not have it."""

import collections
from collections.abc import Mapping, Sequence

from levanter_infer.runtime.hosts import Hosts

_MAX_SHOWN, _MAX_VALUE = 6, 60
ABSENT = "nothing"


class HostsDiffer(ValueError):
    """Processes of one job differ in what they must have in common."""


def agree(hosts: Hosts, name: str, facts: Mapping[str, str]) -> None:
    """Compare `facts` of all processes.

    Raises: HostsDiffer in every process, naming the odd ones and the fields.
    """
    hosts.note(f"comparing {name}")
    differences = odd_ones(hosts.exchange(name, dict(facts)), hosts.names)
    if differences:
        raise HostsDiffer(
            f"the processes of this job differ in their {name}: {'; '.join(differences)}. Start all with the same"
        )


def agree_least(hosts: Hosts, name: str, values: Mapping[str, int]) -> dict[str, int]:
    """The smallest of each value: what every process can afford."""
    hosts.note(f"comparing {name}")
    given = hosts.exchange(name, dict(values))
    return {key: min(each[key] for each in given) for key in values}


def odd_ones(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """For each process that differs from most (where there is no majority, from process 0): who, and in what."""
    differing: dict[int, list[str]] = collections.defaultdict(list)
    for field in sorted({field for each in facts for field in each}):
        values = [str(each.get(field, ABSENT)) for each in facts]
        counts = collections.Counter(values)
        most = max(counts.values())
        usual = next(value for value in values if counts[value] == most)
        for i, value in enumerate(values):
            if value != usual:
                differing[i].append(f"{field} is {_short(value)} and elsewhere {_short(usual)}")
    found = []
    for i in sorted(differing):
        fields = differing[i]
        more = f" and {len(fields) - _MAX_SHOWN} more fields" if len(fields) > _MAX_SHOWN else ""
        found.append(f"on {names[i]} {', '.join(fields[:_MAX_SHOWN])}{more}")
    return found


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 3] + "..."
