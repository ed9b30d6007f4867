"""Jinja's sandbox with a meter: a template's work and memory end at a limit, which is the same on every machine.

Everything is paid for before it is done, in units of very roughly ten nanoseconds and ten bytes. What grows with its
operands costs their size; what can grow beyond them costs the size of the result. For this to be complete, only filters
and methods whose cost is known here can be called: more than the templates of models use.
"""

import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from .files import inside

_PER_STEP = 256  # a turn of a loop, a call
_PER_NODE = 32  # of the syntax tree, each time that it is evaluated
_PER_ITEM = 32  # of a list
_PER_PART = 8  # a character of a string that is cut into parts: each is a string of its own
_MOST_BITS = 4096  # of a number
_WIDEST = 64  # characters of an indent or a separator in JSON


class TooMuchWork(jinja2.TemplateError):
    """The template has used up what it was given."""


_meter: ContextVar[list[int]] = ContextVar("_meter")  # of one number: the units that are left


@contextmanager
def metered(units: int) -> Iterator[None]:
    """Templates are compiled and rendered inside. TooMuchWork ends what would take more than so many units."""
    token = _meter.set([units])
    try:
        yield
    finally:
        _meter.reset(token)


def charge(units: int) -> None:
    meter = _meter.get()
    meter[0] -= units
    if meter[0] < 0:
        raise TooMuchWork("too much work")


def _weight(value: Any) -> int:
    """What a look at all of `value` costs, which has been paid: what it holds several times counts as often."""
    left, units = _meter.get()[0], 0
    rest = [value]
    while rest and units <= left:
        item = rest.pop()
        if isinstance(item, str):
            units += len(item) + 1
        elif isinstance(item, Namespace):
            units += _PER_ITEM
            rest.append(item._Namespace__attrs)
        elif isinstance(item, range):
            units += _PER_ITEM * len(item)
        elif isinstance(item, dict | list | tuple | KeysView | ValuesView | ItemsView):
            units += _PER_ITEM * (len(item) + 1)
            if units <= left:
                rest.extend(item)
                if isinstance(item, dict):
                    rest.extend(item.values())
        else:
            units += 1
    charge(units)
    return units


def _weigh(value: Any) -> Any:
    _weight(value)
    return value


def _copied(value: Any) -> Any:
    """`value`, having paid for a copy of it, but not of what it holds."""
    if isinstance(value, str):
        charge(len(value))
    elif hasattr(value, "__len__"):
        charge(_PER_ITEM * len(value))
    return value


def _small(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise OverflowError(f"a number of more than {_MOST_BITS} bits")
    return value


# --- what calls cost beside the size of their operands; the parameters are those of what is called ---


def _nothing(*args: Any, **named: Any) -> int:
    return 0


def _parts(text: Any, *args: Any, **named: Any) -> int:
    return _PER_PART * len(text) if isinstance(text, str) else 0


def _product(text: Any, chars: Any = None, *args: Any) -> int:
    """Looked for from the right, or one of several characters: every place may be compared with all of them."""
    return len(str(text)) * len(str(chars or ""))


def _parts_from_the_right(text: str, sep: Any = None, maxsplit: int = -1) -> int:
    return _parts(text) + _product(text, sep)


def _replaced(s: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(s).count(str(old)) * len(str(new))


def _joined(value: Any, d: Any = "", attribute: Any = "") -> int:
    return _each(value, str(d), attribute)


def _each(value: Any, *args: Any, **named: Any) -> int:
    """Each item is taken out, and of each all parts of an attribute, as in a.b.c, are looked up."""
    count = len(value) if hasattr(value, "__len__") else 1
    return count * (_PER_ITEM + sum(len(text) for text in (*args, *named.values()) if isinstance(text, str)))


def _remainder(value: Any, num: Any = 2) -> int:
    """The remainder of a text is what it formats."""
    return _percent(value, num) if isinstance(value, str) else 0


def _indented(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    charge(_parts(s))
    return (len(str(s).splitlines()) + 1) * (len(width) if isinstance(width, str) else int(width))


def _percent(value: Any, *args: Any, **named: Any) -> int:
    if re.search(r"%[^%a-zA-Z]*\*", str(value)):
        raise SecurityError("a width in a format must be a number")
    return _fields(str(value), args, named)


def _braces(text: str, *args: Any, **named: Any) -> int:
    if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text)):
        raise SecurityError("a width in a format must be a number")
    return _fields(text, args, named)


def _fields(text: str, *given: Any) -> int:
    """Each field may show all that is given, and each number may be a width."""
    fields = text.count("%") + text.count("{")
    return fields * _weight(given) + sum(int(digits[:12]) for digits in re.findall(r"\d+", text))


_Cost = Callable[..., int]


def _same(names: str, cost: _Cost = _nothing) -> dict[str, _Cost]:
    return dict.fromkeys(names.split(), cost)


_METHODS: dict[type, dict[str, _Cost]] = {
    str: {
        **_same("lower upper title capitalize swapcase casefold startswith endswith removeprefix removesuffix"),
        **_same("find index count partition isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace"),
        **_same("isupper istitle"),
        **_same("strip lstrip rstrip rfind rindex rpartition", _product),
        **_same("split splitlines", _parts),
        "rsplit": _parts_from_the_right,
        "replace": _replaced,
        "join": lambda glue, items: _joined(items, glue),
        "format": _braces,
    },
    list: _same("index count"),
    tuple: _same("index count"),
    dict: _same("get keys values items"),
}
# Of these the operands are looked at whole; of the next, not at all or as lists only.
_FILTERS: dict[str, _Cost] = {
    **_same("abs capitalize e escape float forceescape int lower safe string upper"),
    **_same("dictsort groupby max min sort unique", _each),
    **_same("title", _parts),
    "trim": _product,
    "replace": _replaced,
    "join": _joined,
    "indent": _indented,
    "format": _percent,
}
_LIGHT_FILTERS = {
    **_same("attr count d default first items last length random"),
    **_same("map reject rejectattr select selectattr", _each),
}
_COPYING_FILTERS = {**_same("reverse"), **_same("list", _parts)}
_TESTS = {
    **_same("== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in lower upper"),
    **_same("odd even divisibleby", _remainder),
}

_CALLABLE = (Macro, BlockReference, LoopContext, Joiner, Undefined)  # the last one says itself what is wrong
_UNSEEN = (Macro, BlockReference, LoopContext)  # take their arguments as they are
_GLOBALS = ("range", "dict", "cycler", "joiner", "namespace")


# --- what is not a call: the meter goes into the template itself ---


def _step(units: int) -> bool:
    charge(max(units, 0))  # a template can name it, too, in map()
    return True


# As filters they are called directly. With these names a template cannot call them by accident.
_STEPS: dict[str, Callable[..., Any]] = {"!step": _step, "!weigh": _weigh, "!copied": _copied}


def _apply(name: str, node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _IntoTemplate(NodeTransformer):
    """Puts a payment before every turn of a loop, every macro and whatever looks at or copies a value."""

    def _pay(self, node: nodes.Node, parts: list[nodes.Node]) -> nodes.Expr:
        units = _PER_STEP
        for part in parts:
            units += sum(_PER_NODE for _ in part.find_all(nodes.Node))
            units += sum(len(text.data) for text in part.find_all(nodes.TemplateData))
        return _apply("!step", nodes.Const(units, lineno=node.lineno))

    def _visit_body(self, node: Any) -> nodes.Node:
        pay = self._pay(node, node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(pay, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_For(self, node: nodes.For) -> nodes.Node:
        pay = None if node.test is None else self._pay(node, [node.test])
        self._visit_body(node)
        if node.test is not None and pay is not None:
            node.test = nodes.And(pay, node.test, lineno=node.lineno)
        return node

    def _visit_parts(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _apply("!weigh", n) for n in node.nodes]
        return node

    visit_Output = visit_Concat = _visit_parts

    def _visit_compared(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _apply("!weigh", node.expr)
        return node

    visit_Compare = visit_Operand = _visit_compared

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _apply("!copied", node.node)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _apply("!weigh", node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _apply("!weigh", node.key)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        _small(node.value)
        return node


class _Compiler(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_IntoTemplate().visit(node), frame)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders inside `metered`. `helpers` are functions that templates may call, too."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, helpers: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(optimized=False, **options)  # nothing is computed while compiling
        self.globals = {**{name: self.globals[name] for name in _GLOBALS}, **helpers}
        self._callables = tuple(self.globals.values())
        self.filters = {
            **{name: _paid(self.filters[name], _weigh, cost) for name, cost in _FILTERS.items()},
            **{name: _paid(self.filters[name], _copied, cost) for name, cost in _COPYING_FILTERS.items()},
            **{name: _paid(self.filters[name], _unseen, cost) for name, cost in _LIGHT_FILTERS.items()},
            "tojson": _tojson,
            **_STEPS,
        }
        tests: dict[str, Any] = {**self.tests}
        self.tests = {**tests, **{name: _paid(tests[name], _weigh, cost) for name, cost in _TESTS.items()}}

    def call(self, context: Context, obj: Any, /, *args: Any, **named: Any) -> Any:
        charge(_PER_STEP + _PER_ITEM * len(args))
        given = (*args, *(value for name, value in named.items() if not name.startswith("_")))
        method = getattr(obj, "__wrapped__", obj)  # the sandbox has wrapped str.format
        owner = getattr(method, "__self__", None)
        for kind, costs in _METHODS.items():
            if isinstance(owner, kind):
                if method.__name__ not in costs:
                    raise SecurityError(f"{kind.__name__}.{method.__name__} is not available")
                _weigh(given if kind is dict else (owner, *given))
                own = {name: value for name, value in named.items() if not name.startswith("_")}
                charge(costs[method.__name__](owner, *args, **own))
                return super().call(context, obj, *args, **named)
        known = any(obj is one for one in self._callables)
        if not (known or isinstance(obj, _CALLABLE) or isinstance(owner, LoopContext | Cycler)):
            raise SecurityError(f"{type(obj).__name__} objects cannot be called")
        if not isinstance(obj, _UNSEEN):
            _weigh(given)
        return super().call(context, obj, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _copied(left), _copied(right)
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int):
                    charge(max(times, 0) * (1 if isinstance(one, str) else _PER_ITEM) * len(one))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS:
                raise OverflowError(f"a number of more than {_MOST_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            charge(_percent(left, right))
        else:
            _weigh((left, right))
        return _small(super().call_binop(context, operator, left, right))


def _unseen(value: Any) -> Any:
    return value


def _paid(function: Callable[..., Any], pay: Callable[[Any], Any], cost: _Cost) -> Callable[..., Any]:
    """A filter or a test that is paid for; what it gives one after the other becomes a list."""
    skip = int(hasattr(function, "jinja_pass_arg"))  # the first argument is Jinja's

    @wraps(function)
    def paid(*args: Any, **named: Any) -> Any:
        given = args[skip:]
        charge(_PER_ITEM * len(given))
        for value in (*given, *named.values()):
            pay(value)
        charge(cost(*given, **named))
        result = function(*args, **named)
        if not isinstance(result, Iterator) or isinstance(result, LoopContext):
            return _small(result)
        items = []
        for item in result:
            charge(_PER_STEP)
            items.append(item)
        return items

    return paid


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML, which no model was trained on."""
    widths = [len(width) if isinstance(width, str) else width or 0 for width in (indent, *(separators or ()))]
    if max(widths) > _WIDEST:
        raise SecurityError(f"JSON with an indent or a separator of more than {_WIDEST} characters")
    units = _weight(value)
    levels, level = 0, [value]
    while level and indent is not None:  # of which each indents
        levels += 1
        level = [item for outer in level for item in inside(outer)]
    charge(units * (6 + levels * (1 + max(widths))))  # six: escapes
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
