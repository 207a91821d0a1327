"""The `for` loop of a function, cut out as a function of its own.

    for t in range(S):                          items = over(call(range, S))
        k = keys[t]                             def step(position):
        if t % 2:                       ->          nonlocal K, t, k
            continue                                t = items.at(position)
        K = torch.cat([K, k[None]])                 k = keys[t]
                                                    if t % 2:
                                                        return
                                                    K = torch.cat([K, k[None]])
                                                run(items, step)

What the loop assigns stays a variable of the function, shared through cells, so that `run` may call the step for every
position, as Python does, or set the variables to what they are after the loop.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nsa_compile.loops.items import goes_over, items_of_call
from nsa_compile.loops.python_math import made_by, makes_numbers
from nsa_compile.loops.state import ITEMS

RUN, STEP, POSITION = "__nsa_run", "__nsa_step", "__nsa_position"
OVER, CALL, MADE_BY = "__nsa_over", "__nsa_call", "__nsa_made_by"


class NotALoop(Exception):
    """Why a function has no loop that can be cut out."""


@dataclass(frozen=True)
class Variables:
    """What of a loop's variables counts before and after a step."""

    temporary: frozenset[str]  # a step assigns each before it reads it
    read_after: frozenset[str]  # somebody outside the loop reads them
    not_read: frozenset[str]  # the loop assigns them, and nobody does


def cut_out_loop(
    function: types.FunctionType, run: Callable[..., None], over: str | None
) -> tuple[types.FunctionType, str]:
    """The function with its loop replaced by a call of `run(items, step, variables)`; and `file:line` of the loop.

    Raises:
        NotALoop: there is no loop, or it cannot stand in a function of its own.
    """
    definition, first_line = _definition(function)
    _OfItsClass.of(function, definition).visit(definition)
    loop = _find_loop(definition, over)
    place = f"{function.__code__.co_filename}:{first_line + loop.lineno - 1}"
    inside = [loop, *(n for part in (loop.target, loop.iter, *loop.body) for n in ast.walk(part))]
    outside = {id(n) for n in ast.walk(definition)} - set(map(id, inside))
    _refuse_names_by_text(definition)
    variables = _variables(definition, loop, outside)
    loop.body = [_Numbers(function.__globals__).visit(statement) for statement in loop.body]
    replaced = _Replaced(loop, variables[0])
    definition.body = [s for statement in definition.body for s in _many(replaced.visit(statement))]
    definition.decorator_list = []
    ast.increment_lineno(definition, first_line - 1)
    free = function.__code__.co_freevars
    inner = _compiled(definition, [*free, RUN, OVER, CALL, MADE_BY], function.__code__.co_filename)
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    cells[RUN] = types.CellType(lambda items, step: run(items, step, variables[1]))
    cells |= {OVER: types.CellType(goes_over), CALL: types.CellType(items_of_call), MADE_BY: types.CellType(made_by)}
    closure = tuple(cells[name] for name in inner.co_freevars)
    made = types.FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    return made, place


def _definition(function: types.FunctionType) -> tuple[ast.FunctionDef, int]:
    if hasattr(function, "__wrapped__"):
        raise NotALoop("it is wrapped by another decorator; put @nsa_compile.loop below that one")
    if isinstance(function, functools.partial):
        raise NotALoop("it is a functools.partial; loop the function that it calls, then make the partial of that")
    if inspect.iscoroutinefunction(function):
        raise NotALoop("it is an async def; put the loop into a function of its own, without async")
    try:
        lines, first_line = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise NotALoop("its source cannot be read") from error
    try:
        module = ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError as error:  # the line of a lambda may begin in the middle of a statement
        raise NotALoop("it is no function with a def statement") from error
    for parsed in ast.walk(module):
        if isinstance(parsed, ast.FunctionDef):
            return parsed, max(first_line, 1)
    raise NotALoop("it is no function with a def statement")


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _here(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement that belong to the function it stands in, not to one inside."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from _here(child)


def _find_loop(definition: ast.FunctionDef, over: str | None) -> ast.For:
    loops = [n for statement in definition.body for n in _here(statement) if isinstance(n, ast.For)]
    if over is not None:
        loops = [n for n in loops if over in _stored([n.target])]
        if not loops:
            raise NotALoop(f"it has no loop over {over!r}")
    else:
        inner = {id(n) for loop in loops for statement in loop.body for n in ast.walk(statement)}
        loops = [n for n in loops if id(n) not in inner]
    if len(loops) != 1:
        found = (
            "no `for` loop; write `while` as a `for` over its positions"
            if not loops
            else f"{len(loops)} loops; name the variable of one, as in loop(over='t')"
        )
        raise NotALoop(f"it has {found}")
    (loop,) = loops
    for node in (n for statement in loop.body for n in _here(statement)):
        if isinstance(node, ast.Return):
            raise NotALoop(f"line {node.lineno} of the function returns from within the loop")
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            raise NotALoop(
                f"line {node.lineno} of the function yields from within the loop; append to a list, and return it"
            )
    if any(isinstance(node, ast.Break) for node in _of_this_loop(loop.body)):
        raise NotALoop(
            "the loop has a break; how far it runs would depend on more than its range; shorten the range, or put what "
            "follows under an `if`"
        )
    return loop


def _refuse_names_by_text(definition: ast.FunctionDef) -> None:
    """What looks for variables in the function that it stands in would find those of the step."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, alone = node.func.id, not node.args
            if name in ("eval", "exec", "locals") or (name in ("vars", "dir") and alone):
                raise NotALoop(f"line {node.lineno} of the function calls {name}, which looks for variables by name")
        if isinstance(node, ast.Name) and node.id == "UnboundLocalError":
            raise NotALoop(
                f"line {node.lineno} of the function asks for an UnboundLocalError; a variable of the loop that has no "
                "value raises a NameError"
            )


def _of_this_loop(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes to which a `break` or `continue` of this loop may belong."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
            yield from _of_this_loop(statement.orelse)
        elif not isinstance(statement, _SCOPES):
            yield from _of_this_loop(ast.iter_child_nodes(statement))


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that statements assign in the function they stand in."""
    return set[str]().union(*map(_stored_by, nodes))


def _stored_by(statement: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in _here(statement):
        if isinstance(node, _COMPREHENSIONS):
            continue  # its variables are its own; a walrus in it is found below
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            found |= {node.name} if node.name else set()
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    for node in _here(statement):
        if isinstance(node, _COMPREHENSIONS):
            own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
            walrus = {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
            found -= own - _stored_outside(statement, node)
            found |= walrus
    return found


def _stored_outside(statement: ast.AST, comprehension: ast.AST) -> set[str]:
    inside = {id(n) for n in ast.walk(comprehension)}
    names = (n for n in _here(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {n.id for n in names if id(n) not in inside}


def _of_comprehensions(definition: ast.AST) -> set[int]:
    """The names, by address, that are variables of a comprehension alone: `r` in `[r * 2 for r in x]`."""
    found: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, _COMPREHENSIONS):
            own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
            around = {id(n) for n in ast.walk(node.generators[0].iter)}
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in around)
            found |= {id(n) for n in names if n.id in own}
    return found


def _variables(
    definition: ast.FunctionDef, loop: ast.For, outside: set[int]
) -> tuple[tuple[list[str], list[str]], Variables]:
    everywhere = [n for statement in definition.body for n in _here(statement)]
    declared = {name for n in everywhere if isinstance(n, ast.Global) for name in n.names}
    shared = {name for n in everywhere if isinstance(n, ast.Nonlocal) for name in n.names}
    assigned = _stored([loop.target, *loop.body])
    names = sorted(assigned - declared)
    read: set[str] = set()
    exits: list[set[str]] = []
    end = _follow(loop.body, _stored([loop.target]), read, exits)
    always = set[str].intersection(*exits, *([] if end is None else [end])) if exits or end is not None else set()
    others = outside - _of_comprehensions(definition)
    around = [n for n in ast.walk(definition) if id(n) in others]
    loaded = _read(around) | _stored([n.target for n in around if isinstance(n, ast.AugAssign)])
    functions = [n for n in ast.walk(definition) if id(n) in outside and isinstance(n, _SCOPES) and n is not definition]
    # What some steps leave as it was counts if somebody reads it after the loop.
    read |= (loaded - always) | {name for f in functions for name in _loaded(f)}
    temporary = frozenset(names) - read - shared
    after = frozenset(names) & (loaded | shared)
    return (names, sorted(assigned & declared)), Variables(temporary, after, frozenset(names) - after)


def _loaded(node: ast.AST | None) -> set[str]:
    """The variables that an expression may read, those of functions in it included."""
    return _read(ast.walk(node)) if node is not None else set()


def _read(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load | ast.Del)}


def _follow(statements: list[ast.stmt], assigned: set[str], read: set[str], exits: list[set[str]]) -> set[str] | None:
    """Go through statements; add to `read` what may be read before it is assigned, and to `exits` what is surely
    assigned at each `continue`. Returns what is surely assigned behind them, or None where nothing comes behind."""
    for s in statements:
        behind: list[set[str] | None]
        if isinstance(s, ast.If):
            read |= _loaded(s.test) - assigned
            behind = [_follow(part, set(assigned), read, exits) for part in (s.body, s.orelse)]
            kept = [b for b in behind if b is not None]
            if not kept:
                return None
            assigned = set[str].intersection(*kept)
        elif isinstance(s, ast.For | ast.While):
            read |= _loaded(s.iter if isinstance(s, ast.For) else s.test) - assigned
            inside = set(assigned) | (_stored([s.target]) if isinstance(s, ast.For) else set())
            _follow(s.body, inside, read, [])  # a `continue` there is of the inner loop
            _follow(s.orelse, set(assigned), read, exits)
        elif isinstance(s, ast.With):
            for item in s.items:
                read |= _loaded(item.context_expr) - assigned
                assigned |= _stored([item.optional_vars]) if item.optional_vars else set()
            inner = _follow(s.body, assigned, read, exits)
            if inner is None:
                return None
            assigned = inner
        elif isinstance(s, ast.Continue | ast.Raise):
            read |= _loaded(s) - assigned
            if isinstance(s, ast.Continue):
                exits.append(set(assigned))
            return None
        elif isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Assert | ast.Pass):
            read |= _loaded(s) - assigned
            if isinstance(s, ast.AugAssign):
                read |= _stored([s.target]) - assigned
            if not isinstance(s, ast.AnnAssign) or s.value is not None:
                assigned |= _stored([s]) - {n.target.id for n in ast.walk(s) if isinstance(n, ast.NamedExpr)}
        elif isinstance(s, ast.FunctionDef):
            read |= _loaded(s) - assigned - {s.name}
            assigned |= {s.name}
        else:  # try, match, del, import and what else there may be: it may assign nothing, and read everything
            read |= (_loaded(s) | _stored([s])) - assigned
            if any(isinstance(n, ast.Continue) for n in ast.walk(s)):
                exits.append(set(assigned))
    return assigned


class _OfItsClass(ast.NodeTransformer):
    """What Python reads differently in a class: `super()`, which looks at the first argument of the function that it
    stands in, and names with two underscores ahead."""

    def __init__(self, class_name: str, first: str | None) -> None:
        self.class_name, self.first = class_name.lstrip("_"), first

    @classmethod
    def of(cls, function: types.FunctionType, definition: ast.FunctionDef) -> _OfItsClass:
        *around, _ = function.__qualname__.split(".")
        while around[-1:] == ["<locals>"]:  # a function of a function
            around = around[:-2]
        arguments = [*definition.args.posonlyargs, *definition.args.args]
        return cls(around[-1] if around else "", arguments[0].arg if arguments else None)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_super = isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and not node.keywords
        if is_super and self.first is not None:
            node.args = [ast.copy_location(_name(name), node) for name in ("__class__", self.first)]
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            is_private = isinstance(name, str) and name.startswith("__") and not name.endswith("__")
            if is_private and self.class_name:
                setattr(node, field, f"_{self.class_name}{name}")
        return super().generic_visit(node)


class _Replaced(ast.NodeTransformer):
    """Puts the step and its call in the place of the loop."""

    def __init__(self, loop: ast.For, names: tuple[list[str], list[str]]) -> None:
        self.loop, self.names = loop, names

    def visit_For(self, node: ast.For) -> Any:
        if node is not self.loop:
            return self.generic_visit(node)
        shared, of_module = self.names
        body: list[ast.stmt] = []
        body += [ast.Nonlocal(shared)] if shared else []
        body += [ast.Global(of_module)] if of_module else []
        at = ast.Attribute(_name(ITEMS), "at", ast.Load())
        body.append(ast.Assign([node.target], _call(at, _name(POSITION))))
        statements = [s for statement in node.body for s in _many(_Continues().visit(statement))]
        body += [s for statement in statements for s in _many(_Unannotated().visit(statement))]
        arguments = ast.arguments([], [ast.arg(POSITION)], None, [], [], None, [])
        step = ast.FunctionDef(STEP, arguments, body, [], None)
        # Never run: it makes them variables of this function, which the step may then share.
        named: list[ast.expr] = [ast.Name(name, ast.Store()) for name in shared]
        local = ast.If(ast.Constant(False), [ast.Assign(named, ast.Constant(None))], [])
        items = ast.Assign([ast.Name(ITEMS, ast.Store())], _call(_name(OVER), _by_position(node.iter)))
        call = ast.Expr(_call(_name(RUN), _name(ITEMS), _name(STEP)))
        made = [*([local] if shared else []), items, step, call]
        for statement in made:
            for n in ast.walk(statement):
                if not hasattr(n, "lineno") and "lineno" in n._attributes:
                    ast.copy_location(n, node)
            ast.fix_missing_locations(statement)
        return [*made, *node.orelse]


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call(function: ast.expr, *args: ast.expr) -> ast.Call:
    return ast.Call(function, list(args), [])


def _by_position(items: ast.expr) -> ast.expr:
    """The expression with its call, and those that a `zip` is of, left to `items_of_call`."""
    if not isinstance(items, ast.Call) or any(isinstance(x, ast.Starred) for x in items.args):
        return items
    args = items.args
    if isinstance(items.func, ast.Name) and items.func.id in ("enumerate", "zip", "reversed"):
        args = [_by_position(x) for x in args]
    return ast.Call(_name(CALL), [items.func, *args], items.keywords)


class _Continues(ast.NodeTransformer):
    """`continue` of the loop leaves the step."""

    def visit_Continue(self, node: ast.Continue) -> ast.Return:
        return ast.copy_location(ast.Return(None), node)

    def visit_For(self, node: ast.For) -> ast.For:
        node.orelse = [s for statement in node.orelse for s in _many(self.visit(statement))]
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        node.orelse = [s for statement in node.orelse for s in _many(self.visit(statement))]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node


class _Numbers(ast.NodeTransformer):
    """Calls of `float`, `int` and functions of `math`, which also take numbers that change from step to step."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.names = {"float", "int"} | {name for name, x in variables.items() if makes_numbers(x)}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            node.args.insert(0, node.func)
            node.func = ast.copy_location(_name(MADE_BY), node.func)
        return self.generic_visit(node)


class _Unannotated(ast.NodeTransformer):
    """Variables without their annotations, which Python does not evaluate, and does not take beside `nonlocal`."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            return node
        made = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.copy_location(made, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node


def _many(statements: Any) -> list[ast.stmt]:
    return statements if isinstance(statements, list) else [statements]


def _compiled(definition: ast.FunctionDef, free: list[str], filename: str) -> types.CodeType:
    """The code of a function whose free variables are those named."""
    name, definition.name = definition.name, "__nsa_function"  # its own name is a variable of its module in it
    bound = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in free]
    around = ast.FunctionDef("around", ast.arguments([], [], None, [], [], None, []), [*bound, definition], [], None)
    module = ast.fix_missing_locations(ast.Module([around], []))
    code = compile(module, filename, "exec", dont_inherit=True)
    outer = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    inner = next(c for c in outer.co_consts if isinstance(c, types.CodeType) and c.co_name == definition.name)
    return inner.replace(co_name=name)
