"""Syntax: the tree of a function's or class's source, and the globals that it names."""

import ast
import copy
import dis
import importlib.util
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

Documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef

# Fields of a tree that change nothing of what code does, or that only some versions of Python have.
LEFT_OUT = {"ctx", "kind", "type_comment", "type_params", "type_ignores"}


def parse(definition: FunctionType | type | ModuleType) -> Any:
    """The tree of a function, class or module, without annotations and docstrings.

    Raises:
        OSError, TypeError: its source cannot be found.
    """
    if isinstance(definition, ModuleType):
        return _strip(ast.parse(inspect.getsource(definition)))
    methods = methods_of(definition) if isinstance(definition, type) else [definition]
    code: Any = methods[0].__code__ if methods else None
    if methods:  # first, because a notebook knows the source of functions alone
        lines, line = inspect.findsource(code)[0], code.co_firstlineno
    else:
        lines, at = inspect.findsource(definition)
        line = at + 1
    name = definition.__name__ if isinstance(definition, type) else code.co_name
    found = [
        node
        for node in _list_definitions(lines, line)
        if name == getattr(node, "name", "<lambda>")
        and isinstance(node, ast.ClassDef) == isinstance(definition, type)
    ]
    if len(found) > 1 and isinstance(definition, FunctionType):
        found = [node for node in found if _holds(node, code)]
    if len({dump(node) for node in found}) != 1:
        raise OSError("its file changed after it was imported, or one line has several of them")
    return _strip(found[0])


def methods_of(kind: type) -> list[FunctionType]:
    """The functions that stand in the source of a class; not those that a dataclass generates."""
    methods = []
    for entry in vars(kind).values():
        for name in ("__func__", "fget", "func"):  # of methods and of (cached) properties
            entry = getattr(entry, name, None) or entry
        function = inspect.unwrap(entry) if isinstance(entry, FunctionType) else None
        if function and function.__code__.co_qualname == f"{kind.__qualname__}.{function.__name__}":
            methods.append(function)
    return methods


def _list_definitions(lines: list[str], line: int) -> list[Any]:
    """The functions that begin on a line, counted from 1, and the innermost class around it."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # not a file of Python alone, such as a page with snippets
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines[line - 1 :]))))
        line = 1
    functions, classes = [], []
    for node in ast.walk(tree):  # from the outermost in
        if isinstance(node, Definition):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if isinstance(node, ast.ClassDef) and first <= line <= (node.end_lineno or line):
                classes.append(node)
            elif not isinstance(node, ast.ClassDef) and first == line:
                functions.append(node)
    return [*functions, *classes[-1:]]


def _holds(node: Any, code: CodeType) -> bool:
    """Whether all that `code` does is in the body of this lambda, and in none inside it."""
    inner = [each for each in ast.walk(node.body) if isinstance(each, ast.Lambda)]
    places = [
        (line, column)
        for line, _, column, end in code.co_positions()
        if line is not None and column is not None and end
    ]

    def within(place: tuple[int, int], tree: Any) -> bool:
        start = tree.lineno, tree.col_offset
        return start <= place < (tree.end_lineno, tree.end_col_offset)

    return all(within(place, node.body) for place in places) and not any(
        all(within(place, each.body) for place in places) for each in inner
    )


class _Strip(ast.NodeTransformer):
    """Takes away annotations and docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant("")
        return node


def _strip(tree: ast.AST) -> ast.AST:
    return ast.fix_missing_locations(_Strip().visit(copy.deepcopy(tree)))


def dump(node: Any) -> str:
    """A tree in words: the same wherever the code stands, and on every version of Python.

    >>> dump(ast.parse("-x", mode="eval").body)
    'UnaryOp(op=USub(),operand=Name(id=x))'
    """
    if isinstance(node, list):
        return f"[{','.join(map(dump, node))}]"
    if isinstance(node, ast.Constant):
        return f"Constant({type(node.value).__name__} {node.value!r})"
    if not isinstance(node, ast.AST):
        return str(node)
    fields = (
        f"{name}={dump(value)}"
        for name, value in ast.iter_fields(node)
        if name not in LEFT_OUT and value is not None and value != []
    )
    return f"{type(node).__name__}({','.join(fields)})"


def find_names(tree: Any, captured: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """Each global that the code of a function or class loads, with the attributes it takes of it.

    >>> find_names(ast.parse("def f(x): return np.char.upper(x) + K + y").body[0], ["y"])
    [('K',), ('np', 'char', 'upper')]

    Args:
        tree: of the function or class. Its decorators do not count.
        captured: variables of functions around it.
    """
    tree = copy.copy(tree)
    if isinstance(tree, ast.Lambda):
        tree = ast.Expr(tree)
    else:
        tree.decorator_list = []
    around: Any = ast.parse(f"def around({', '.join(captured)}): pass")
    around.body[0].body = [tree]
    return sorted(set(_find_names(compile(ast.fix_missing_locations(around), "", "exec"))))


def _find_names(code: CodeType) -> Iterator[tuple[str, ...]]:
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
            continue
        if instruction.opname == "EXTENDED_ARG":
            continue
        if chain:
            yield tuple(chain)
        chain = []
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = [instruction.argval]
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _find_names(constant)


def find_imports(tree: ast.AST, package: str | None) -> Iterator[tuple[str, str]]:
    """Each (module, name) that code imports while it runs; the name is "" for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, package)
            yield from ((module, alias.name) for alias in node.names)
