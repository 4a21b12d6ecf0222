"""Sandbox: Jinja for chat templates, as transformers sets it up, with bounds on time and output."""

import contextvars
import datetime
import functools
import itertools
import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import InvalidValue, NotInstalled, require
from pipeline.text.regions import BEGIN, END

# A template may run for so many seconds, and no text in it may have more characters.
SECONDS, LARGEST = 20, 1 << 26

# Methods whose result is as long as their argument says.
WIDENING = ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes")

# Filters that count as far as their argument says, and the most that it may be, as for `range`.
COUNTING, MOST = ("batch", "slice", "round"), 100_000

SEQUENCES = str | bytes | list | tuple

# The most that JSON may be indented.
WIDEST = 100

# Width and precision of the fields of `%`: numbers, or `*` for a value.
PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")

# When the template that runs now has to end.
_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline")


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template; it can read no file, and no attribute that is not data.

    Raises:
        ValueError: it is not Jinja, it fails, or it goes beyond a bound.
        ImportError: jinja2 is not installed, or is older than 3.1.6, whose sandbox has a hole.
    """
    compiled = _compile(template)
    token = _deadline.set(time.monotonic() + SECONDS)
    pieces, size = list[str](), 0
    try:
        for piece in compiled.generate(**values):
            pieces.append(piece)
            size += len(piece)
            _require_small(size)
    except Exception as error:  # a template may raise anything
        more = ""
        if "'strftime_now' is undefined" in str(error):
            more = '; it spells the day: give the one that training is to see, date="2024-07-26"'
        raise InvalidValue(f"the chat template fails: {error}{more}") from error
    finally:
        _deadline.reset(token)
    return "".join(pieces)


def tell_day(date: str) -> Any:
    """The function `strftime_now` of a template, for a fixed day."""
    try:
        day = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
    except (TypeError, ValueError):
        raise InvalidValue(
            f"date is {date!r:.80}; give the day that the template spells, such as '2024-07-26'"
        ) from None
    return day.strftime


def _require_small(size: float) -> None:
    if size > LARGEST:
        raise InvalidValue(f"it makes a text of more than {LARGEST:,} characters; correct it")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(value: Any) -> float:
    return len(value) if hasattr(value, "__len__") else abs(value) if _is_whole(value) else 1


def _product(left: Any, right: Any) -> float:
    """The size of a text, or another sequence, that is repeated."""
    sequences = isinstance(left, SEQUENCES) or isinstance(right, SEQUENCES)
    return _size(left) * _size(right) if sequences else 0


def _find_widest(values: Any) -> float:
    """The largest of the whole numbers among the arguments of a method or a filter."""
    return max(map(_size, filter(_is_whole, values)), default=0)


def _require_short_percent(text: Any, values: Any) -> None:
    """Refuses `%` with very wide fields, by its text, or by values that are widths."""
    if isinstance(text, str):
        widths = [width for widths in PERCENT.findall(text) for width in widths]
        _require_small(max((int(width) for width in widths if width.isdecimal()), default=0))
        if "*" in widths:
            _require_small(_find_widest(values))


def _require_short_fields(text: Any, values: Any) -> None:
    """Refuses a format in braces with very wide fields, as `_require_short_percent`."""
    if isinstance(text, str):
        fields = text.replace("{{", "").replace("}}", "")
        nested = re.search(r"\{[^{}]*:[^{}]*\{", fields)
        widths = [fields] if nested else re.findall(r"\{[^{}:]*:([^{}]*)", fields)
        digits = (int(each) for width in widths for each in re.findall(r"\d+", width))
        _require_small(max(digits, default=0))
        if nested:
            mappings = [value.values() for value in values if isinstance(value, dict)]
            _require_small(_find_widest([*values, *itertools.chain(*mappings)]))


def _require_small_replacement(text: Any, old: Any, new: Any) -> None:
    """Refuses to put a text in place of others, if that makes a long one."""
    if isinstance(old, str) and isinstance(new, str):
        _require_small(len(text) + text.count(old) * len(new))


def _require_small_result(value: Any) -> Any:
    """A value, if it is no text or list that is too long to work with again."""
    _require_small(len(value) if isinstance(value, SEQUENCES) else 0)
    return value


def _require_small_join(separator: Any, items: Any) -> list[Any]:
    """The items as a list, after refusing those that make a long text with a separator."""
    items = [*items]
    lengths = (len(item) if hasattr(item, "__len__") else 1 for item in items)
    _require_small(sum(lengths) + _size(separator) * len(items))
    return items


def _bound_filter(function: Any) -> Any:
    """A filter whose widths are bounded."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        values = [
            value for value in (*arguments, *options.values()) if isinstance(value, str | int)
        ]
        if values and function.__name__ == "do_format":
            _require_short_percent(values[0], values[1:])
        else:
            _require_small(_find_widest(values))
        if function.__name__ == "do_indent" and len(values) > 1:
            _require_small(_size(values[1]) * (str(values[0]).count("\n") + 1))
        return function(*arguments, **options)

    return call


def _bound_replace(function: Any) -> Any:
    """The filter that replaces, whose text is bounded."""

    @functools.wraps(function)
    def call(context: Any, s: Any, old: str, new: str, count: int | None = None) -> Any:
        _require_small_replacement(str(s), old, new)
        return function(context, s, old, new, count)

    return call


def _bound_count(function: Any) -> Any:
    """A filter whose count, which comes after its value, is bounded."""
    at = 1 + hasattr(function, "jinja_pass_arg")  # which is first, if the filter takes one

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        named = [value for name, value in options.items() if name != "fill_with"]
        if _find_widest((*arguments[at : at + 1], *named)) > MOST:
            raise InvalidValue(f"it counts beyond {MOST:,}; correct it")
        return function(*arguments, **options)

    return call


def _bound_join(function: Any) -> Any:
    """The filter that joins items, whose text is bounded."""

    @functools.wraps(function)
    def call(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        return function(context, _require_small_join(d, value), d, attribute)

    return call


def _tick(context: Any, value: None) -> None:
    if time.monotonic() > _deadline.get():
        raise InvalidValue(f"it runs for more than {SECONDS} seconds; correct it")


def _concatenate(context: Any, *values: Any) -> str:
    return _concat(map(str, values))


def _concat(texts: Iterable[str]) -> str:
    return "".join(_require_small_join("", texts))


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers spells it."""
    if indent is not None and _size(indent) > WIDEST:
        raise InvalidValue(f"it indents JSON by more than {WIDEST}; correct it")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _fail(message: str) -> None:
    raise InvalidValue(message)


@functools.cache
def _environment() -> Any:
    """The environment of all templates, in which operations that may make long texts are bounded.

    Raises:
        ImportError: jinja2 is not installed.
    """
    sandbox: Any = require("jinja2.sandbox", extra="jinja", purpose="a chat template")
    import jinja2
    from jinja2 import ext, nodes

    class Generation(ext.Extension):
        """The block that transformers has for text that a model generates."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_surround")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _surround(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Refuses what is unsafe at once, rather than giving it the value of a missing name."""

        intercepted_binops = frozenset(["+", "*", "**", "%"])
        concat = staticmethod(_concat)  # of blocks, macros and what is set to a block

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise sandbox.SecurityError(f"{attribute!r} of {type(obj).__name__!r} is unsafe")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                if type(left) is str and type(right) is str:
                    _require_small(len(left) + len(right))
                    return left + right
                _require_small(_size(left) + _size(right) if isinstance(left, SEQUENCES) else 0)
            elif operator == "%":
                _require_short_percent(left, right if isinstance(right, tuple) else [right])
            else:
                bits = _size(right) * (left.bit_length() if _is_whole(left) else 1)
                _require_small(bits if operator == "**" else _product(left, right))
            return _require_small_result(super().call_binop(context, operator, left, right))

        def call(self, context: Any, function: Any, *arguments: Any, **options: Any) -> Any:
            name, values = getattr(function, "__name__", ""), (*arguments, *options.values())
            text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            if name in WIDENING:
                _require_small(_find_widest(values))
            elif name in ("format", "format_map"):
                _require_short_fields(text, values)
            elif name == "replace" and isinstance(text, str) and len(arguments) > 1:
                _require_small_replacement(text, *arguments[:2])
            elif name == "join" and len(arguments) == 1:
                arguments = (_require_small_join(text, arguments[0]),)
            return _require_small_result(super().call(context, function, *arguments, **options))

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    for name in ("center", "format", "indent"):
        environment.filters[name] = _bound_filter(environment.filters[name])
    environment.filters["replace"] = _bound_replace(environment.filters["replace"])
    for name in COUNTING:
        environment.filters[name] = _bound_count(environment.filters[name])
    environment.filters["join"] = _bound_join(environment.filters["join"])
    # Their results differ each time, so that a corpus could not be made again.
    del environment.filters["random"], environment.globals["lipsum"]
    # Filters that get the context are not computed when a template is compiled.
    environment.filters["tick"] = jinja2.pass_context(_tick)
    environment.filters["concatenate"] = jinja2.pass_context(_concatenate)
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _fail
    return environment


@functools.lru_cache(16)
def _compile(text: str) -> Any:
    """A template whose loops and macros look at the clock, and whose `~` looks at sizes.

    Raises:
        ValueError: it is not Jinja.
        ImportError: see `render`.
    """
    environment = _environment()
    import jinja2.nodes

    if (version := tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3]))) < (3, 1, 6):
        raise NotInstalled(
            f"jinja2 is {'.'.join(map(str, version))}, in which a template can leave the sandbox; "
            "pip install 'jinja2>=3.1.6'"
        )
    try:
        tree = _bound(environment.parse(text), jinja2.nodes)
        code = environment.compile(tree.set_environment(environment))
    except jinja2.TemplateSyntaxError as error:
        raise InvalidValue(
            f"the chat template is not Jinja: {error}, in line {error.lineno}; give another one as "
            "template="
        ) from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _bound(tree: Any, nodes: Any) -> Any:
    """A tree of Jinja, with looks at the clock in loops and macros, and at sizes in each `~`."""

    def apply(name: str, value: Any, arguments: Any, line: int) -> Any:
        return nodes.Filter(value, name, arguments, [], None, None).set_lineno(line)

    def replace(value: Any) -> Any:
        """A node with the filter "concatenate" for each `~` in it; others as they are."""
        if isinstance(value, list):
            return [*map(replace, value)]
        if not isinstance(value, nodes.Node):
            return value
        for name, child in [*value.iter_fields()]:
            setattr(value, name, replace(child))
        if isinstance(value, nodes.Concat):
            first, *others = value.nodes
            return apply("concatenate", first, others, value.lineno)
        return value

    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        tick = apply("tick", nodes.Const(None), [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
    return replace(tree)


def find_sought(template: str) -> set[str]:
    """The texts that a template looks for in others, such as `</think>`, and `<think>` with it."""
    _compile(template)  # or it is refused
    tree = _environment().parse(template)
    from jinja2 import nodes

    calls = (call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr))
    operands = [operand for call in calls for operand in call.args]
    operands += [test.expr for test in tree.find_all(nodes.Compare) if test.ops[0].op == "in"]
    values = [operand.value for operand in operands if isinstance(operand, nodes.Const)]
    texts = {value for value in values if isinstance(value, str) and value}
    return {*texts, *(text.replace("</", "<", 1) for text in texts)}
