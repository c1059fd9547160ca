"""Plain objects ↔ values that `json` can write, by what their classes declare. Pure.

A form says how values of one type are stored. Forms are made from types when a table is made, so that a type without
one is refused at once, and they store whole columns: all values of one field together, most of which go through as they
are. Objects that several others refer to are stored once, in a list of their own, and referred to by their place in it;
so circles do no harm. What is read back is checked against the types: it can be nothing but what they say.
"""

from __future__ import annotations

import json
import types
import typing
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum, StrEnum
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

MAX_SHARED: Final = 1 << 20
"""Objects of one class that are read back: more than there ever are."""
_NEW: Final = -1
_SIMPLE: Final = (bool, int, float, str, types.NoneType)


class Writer:
    """What is being stored: numbers the shared objects as they are met."""

    def __init__(self, memo: Mapping[int, tuple[Any, str]] | None = None) -> None:
        """`memo` is what the `memo` of an earlier one has become."""
        self.met: dict[type, list[Any]] = {}
        self.earlier = memo or {}
        self.memo: dict[int, tuple[Any, str]] = {}
        """What unchanging objects are stored as, by their ids, with themselves: then the ids stay theirs."""
        self._numbers: dict[int, int | None] = {id(None): None}

    def numbers_of(self, kind: type, values: list[Any]) -> list[int | None]:
        """The numbers of shared objects of one class; None for None."""
        numbers = self._numbers
        found = list(map(numbers.get, map(id, values), repeat(_NEW)))
        if _NEW in found:
            met = self.met.setdefault(kind, [])
            for at, value in enumerate(values):
                if found[at] == _NEW:
                    # Whoever is in `met` stays alive, and keeps its id. It may come twice in one column.
                    number = numbers.get(id(value))
                    if number is None:
                        number = numbers[id(value)] = len(met)
                        met.append(value)
                    found[at] = number
        return found


class Reader:
    """What is being read back: the shared objects by class and number."""

    def __init__(self) -> None:
        self.made: dict[type, list[Any]] = {}


class Form(ABC):
    """How values of one type are stored."""

    as_is = False
    """They can't change and `json` writes them as they are."""

    @abstractmethod
    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        """These values, as `json` can write them, in their order."""

    @abstractmethod
    def read(self, stored: Any, reader: Reader) -> Any:
        """One value back. Raises ValueError for what can't have been stored."""

    @abstractmethod
    def __str__(self) -> str:
        """Two forms with the same text read what the other stored."""


class Simple(Form):
    """Numbers, strings, truth values and None, enumerations among them."""

    as_is = True

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = frozenset(kinds)
        enums = [kind for kind in self._kinds if issubclass(kind, Enum)]
        self._members = {member.value: member for kind in enums for member in kind}
        if len(self._members) < sum(map(len, enums)) or (enums and self._kinds & {int, str}):
            raise TypeError(f"{self._kinds} can't be told apart")
        if any(not issubclass(kind, IntEnum | StrEnum) for kind in enums):
            raise TypeError(f"{enums}: only IntEnum and StrEnum are written as they are")

    def store(self, values: list[Any], writer: Writer) -> list[Any]:  # noqa: ARG002  the base's
        return values

    def read(self, stored: Any, reader: Reader) -> Any:  # noqa: ARG002  the base's
        kind = type(stored)
        if kind in self._kinds or (kind is int and float in self._kinds):
            return stored
        if kind in (int, str) and stored in self._members:
            return self._members[stored]
        raise ValueError(f"{stored!r:.80} is none of {self}")

    def __str__(self) -> str:
        members = [f"{type(member).__name__}.{member.name}={value}" for value, member in self._members.items()]
        return "|".join(sorted([kind.__name__ for kind in self._kinds if not issubclass(kind, Enum)] + members))


class Bytes(Form):
    """Bytes, as text with a character for each."""

    def store(self, values: list[Any], writer: Writer) -> list[Any]:  # noqa: ARG002  the base's
        return [value.decode("latin-1") for value in values]

    def read(self, stored: Any, reader: Reader) -> Any:  # noqa: ARG002  the base's
        if type(stored) is not str:
            raise ValueError("expected text")
        return stored.encode("latin-1")

    def __str__(self) -> str:
        return "bytes"


class Maybe(Form):
    """None, or something."""

    def __init__(self, inner: Form) -> None:
        self._inner = inner

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        stored = iter(self._inner.store([value for value in values if value is not None], writer))
        return [None if value is None else next(stored) for value in values]

    def read(self, stored: Any, reader: Reader) -> Any:
        return None if stored is None else self._inner.read(stored, reader)

    def __str__(self) -> str:
        return f"{self._inner}?"


class Unchanging(Form):
    """A tuple of many values that never change, most of them the same as before: each is made into text once."""

    def __init__(self, part: Form) -> None:
        self._part = part

    def store(self, values: list[tuple[Any, ...]], writer: Writer) -> list[Any]:
        return [f"[{','.join([self._text(one, writer) for one in value])}]" for value in values]

    def _text(self, value: Any, writer: Writer) -> str:
        found = writer.earlier.get(id(value))
        if found is None:
            (stored,) = self._part.store([value], writer)
            found = value, json.dumps(stored)
        writer.memo[id(value)] = found
        return found[1]

    def read(self, stored: Any, reader: Reader) -> Any:
        if type(stored) is not str:
            raise ValueError("expected text")
        return tuple(self._part.read(one, reader) for one in _list(json.loads(stored)))

    def __str__(self) -> str:
        return f"text[{self._part}]"


class FixedTuple(Form):
    """A tuple of so many values."""

    def __init__(self, parts: list[Form]) -> None:
        self._parts = parts
        self.as_is = all(part.as_is for part in parts)

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        if self.as_is or not values:
            return values
        columns = zip(*values, strict=True)
        stored = (part.store(list(column), writer) for part, column in zip(self._parts, columns, strict=True))
        return list(zip(*stored, strict=True))

    def read(self, stored: Any, reader: Reader) -> Any:
        return tuple(part.read(one, reader) for part, one in zip(self._parts, _list(stored), strict=True))

    def __str__(self) -> str:
        return f"({','.join(map(str, self._parts))})"


class Row(Form):
    """A tuple, list, set or deque of any number of values."""

    def __init__(self, kind: type, part: Form) -> None:
        self._kind = kind
        self._part = part
        self.as_is = kind is tuple and part.as_is

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        if self.as_is:
            return values
        if self._kind is deque:
            return [[value.maxlen, self._part.store(list(value), writer)] for value in values]
        return [self._part.store(list(value), writer) for value in values]

    def read(self, stored: Any, reader: Reader) -> Any:
        row = _list(stored)
        if self._kind is deque:
            if len(row) != 2 or type(row[0]) not in (int, types.NoneType) or (row[0] or 0) < 0:
                raise ValueError("expected a length and a list")
            return deque((self._part.read(one, reader) for one in _list(row[1])), maxlen=row[0])
        return self._kind(self._part.read(one, reader) for one in row)

    def __str__(self) -> str:
        return f"{self._kind.__name__}[{self._part}]"


class Table(Form):
    """A dictionary; its order is kept."""

    def __init__(self, kind: type, key: Form, value: Form) -> None:
        self._kind = kind
        self._key, self._value = key, value

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        key, value = self._key, self._value
        return [(key.store(list(one), writer), value.store(list(one.values()), writer)) for one in values]

    def read(self, stored: Any, reader: Reader) -> Any:
        keys, values = map(_list, _list(stored, 2))
        pairs = zip(keys, values, strict=True)
        made: Any = self._kind({self._key.read(key, reader): self._value.read(value, reader) for key, value in pairs})
        if len(made) != len(keys):
            raise ValueError("a key twice")
        return made

    def __str__(self) -> str:
        return f"{self._kind.__name__}[{self._key}:{self._value}]"


class Fields(Form):
    """An object by its fields, which are all that it has."""

    def __init__(self, kind: type, forms: Mapping[str, Form]) -> None:
        self.kind = kind
        self.forms = forms

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        return list(zip(*self.columns(values, writer), strict=True))

    def columns(self, values: list[Any], writer: Writer) -> Iterator[list[Any]]:
        """All values of each field."""
        return (form.store(list(map(attrgetter(name), values)), writer) for name, form in self.forms.items())

    def read(self, stored: Any, reader: Reader) -> Any:
        made: Any = object.__new__(self.kind)
        self.fill(made, stored, reader)
        return made

    def fill(self, made: Any, stored: Any, reader: Reader) -> None:
        """Gives an object its fields."""
        for (name, form), value in zip(self.forms.items(), _list(stored, len(self.forms)), strict=True):
            if isinstance(form, Part):
                form.fill(getattr(made, name), value, reader)
            else:
                # Not `setattr`: a frozen object is being made.
                object.__setattr__(made, name, form.read(value, reader))

    def __str__(self) -> str:
        return f"{self.kind.__name__}({','.join(f'{name}:{form}' for name, form in self.forms.items())})"


class Part(Fields):
    """An object that is there before it is read back, made by the one that it is a part of."""


class OneOf(Form):
    """An object of one of several classes."""

    def __init__(self, forms: Iterable[Fields]) -> None:
        self._forms = {form.kind: form for form in forms}
        self._names = {form.kind.__name__: form for form in self._forms.values()}

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        return [[type(value).__name__, *self._forms[type(value)].store([value], writer)] for value in values]

    def read(self, stored: Any, reader: Reader) -> Any:
        name, value = _list(stored, 2)
        if type(name) is not str or name not in self._names:
            raise ValueError(f"{name!r:.80} is no kind of object")
        return self._names[name].read(value, reader)

    def __str__(self) -> str:
        return "|".join(sorted(map(str, self._forms.values())))


class Shared(Form):
    """An object that others refer to as well, or None."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def store(self, values: list[Any], writer: Writer) -> list[Any]:
        return writer.numbers_of(self._kind, values)

    def read(self, stored: Any, reader: Reader) -> Any:
        made = reader.made[self._kind]
        if type(stored) is not int or not 0 <= stored < len(made):
            raise ValueError(f"there is no such {self._kind.__name__}")
        return made[stored]

    def __str__(self) -> str:
        return self._kind.__name__


class Schema(NamedTuple):
    """How objects of some classes are stored."""

    roots: Mapping[type, Part]
    shared: Mapping[type, Fields]

    def store(self, roots: Iterable[Any], writer: Writer) -> dict[str, Any]:
        """These objects and all that they refer to. What changes later changes nothing in what is returned."""
        stored = [one for root in roots for one in self.roots[type(root)].store([root], writer)]
        columns: dict[type, list[list[Any]]] = {kind: [[] for _ in form.forms] for kind, form in self.shared.items()}
        done = dict.fromkeys(self.shared, 0)
        # Those met on the way are stored in turn, until there are no more.
        while new := [kind for kind in self.shared if len(writer.met.get(kind, ())) > done[kind]]:
            for kind in new:
                values = writer.met[kind][done[kind] :]
                done[kind] += len(values)
                for column, more in zip(columns[kind], self.shared[kind].columns(values, writer), strict=True):
                    column += more
        tables = {kind.__name__: [done[kind], *map(_shortened, columns[kind])] for kind in self.shared}
        return {"roots": stored, "shared": tables}

    def fill(self, stored: Any, roots: Iterable[Any]) -> None:
        """Gives objects that are there back what was stored, each before the next is asked for. Raises ValueError for
        what was not stored like this; then the objects are of no use."""
        reader = Reader()
        tables = _named(_named(stored, ("roots", "shared"))["shared"], [kind.__name__ for kind in self.shared])
        columns: dict[type, list[list[Any]]] = {}
        for kind, form in self.shared.items():
            count, *shortened = _list(tables[kind.__name__], len(form.forms) + 1)
            if type(count) is not int or not 0 <= count <= MAX_SHARED:
                raise ValueError("expected how many there are")
            columns[kind] = [_lengthened(_list(column), count) for column in shortened]
            reader.made[kind] = [object.__new__(kind) for _ in range(count)]
        for kind, form in self.shared.items():
            for (name, one), column in zip(form.forms.items(), columns[kind], strict=True):
                for made, value in zip(reader.made[kind], column, strict=True):
                    setattr(made, name, one.read(value, reader))
        for root, one in zip(roots, _list(stored["roots"]), strict=True):
            self.roots[type(root)].fill(root, one, reader)

    def __str__(self) -> str:
        """Two schemas with the same text read what the other stored."""
        return "\n".join(str(form) for form in (*self.roots.values(), *self.shared.values()))


def schema(
    *,
    roots: Iterable[type],
    parts: Mapping[type, Mapping[str, Any]],
    shared: Sequence[type],
    values: Iterable[type],
    unchanging: Iterable[type],
    forms: Mapping[Any, Form],
) -> Schema:
    """A schema for these `roots`. `parts` are objects that make their own parts, with the types of what is stored of
    them; they are among the roots, or parts of others. `shared` are dataclasses that others refer to, `values` those
    that are stored where they stand; `unchanging` are those among them that come in long tuples. `forms` are for types
    that are none of these. Raises TypeError for a type that has no form."""
    maker = _Maker(frozenset(shared), frozenset(values), frozenset(unchanging), parts, forms)
    return Schema(
        {root: maker.part(root) for root in roots},
        {kind: maker.fields(kind) for kind in shared},
    )


class _Maker(NamedTuple):
    shared: frozenset[type]
    values: frozenset[type]
    unchanging: frozenset[type]
    parts: Mapping[type, Mapping[str, Any]]
    forms: Mapping[Any, Form]

    def part(self, kind: type) -> Part:
        return Part(kind, {name: self.form(hint) for name, hint in self.parts[kind].items()})

    def fields(self, kind: type) -> Fields:
        if not is_dataclass(kind):
            raise TypeError(f"{kind} is no dataclass: what it holds is not declared")
        hints = typing.get_type_hints(kind)
        return Fields(kind, {field.name: self.form(hints[field.name]) for field in fields(kind)})

    def form(self, hint: Any) -> Form:  # noqa: C901  one case for each kind of type
        if hint in self.forms:
            return self.forms[hint]
        if hint is None:
            hint = types.NoneType
        if hint in _SIMPLE or (isinstance(hint, type) and issubclass(hint, Enum)):
            return Simple([hint])
        if hint is bytes:
            return Bytes()
        if hint in self.shared:
            return Shared(hint)
        if hint in self.parts:
            return self.part(hint)
        if hint in self.values:
            return self.fields(hint)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union(arguments)
        if origin is tuple and arguments[-1] is not Ellipsis:
            return FixedTuple([self.form(argument) for argument in arguments])
        if origin is tuple and arguments[0] in self.unchanging:
            return Unchanging(self.form(arguments[0]))
        if origin in (tuple, list, set, deque):
            return Row(origin, self.form(arguments[0]))
        if origin in (dict, Mapping):
            return Table(dict, self.form(arguments[0]), self.form(arguments[1]))
        if origin is Counter:
            return Table(Counter, self.form(arguments[0]), Simple([int]))
        raise TypeError(f"{hint} can't be stored: it has no place in the table")

    def _union(self, arguments: tuple[Any, ...]) -> Form:
        others = [argument for argument in arguments if argument is not types.NoneType]
        if all(one in _SIMPLE or (isinstance(one, type) and issubclass(one, Enum)) for one in others):
            return Simple(arguments)
        if len(others) == 1:
            inner = self.form(others[0])
        elif all(one in self.values for one in others):
            inner = OneOf(self.fields(one) for one in others)
        else:
            raise TypeError(f"{others} can't be told apart")
        return Maybe(inner) if len(others) < len(arguments) else inner


def _list(stored: Any, length: int | None = None) -> list[Any]:
    if type(stored) is not list or (length is not None and len(stored) != length):
        raise ValueError(f"expected a list{'' if length is None else f' of {length}'}")
    return stored


def _shortened(column: list[Any]) -> list[Any]:
    """One value for a column that has no other: most of what has ended is the same in most ways."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


def _lengthened(column: list[Any], count: int) -> list[Any]:
    if len(column) == 1:
        return column * count
    if len(column) != count:
        raise ValueError("columns differ in length")
    return column


def _named(stored: Any, names: Iterable[str]) -> dict[str, Any]:
    if type(stored) is not dict or stored.keys() != set(names):
        raise ValueError(f"expected {', '.join(names)}")
    return stored
