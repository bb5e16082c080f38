"""The source of a user's files: where they evaluate, generate and save, and which numbers count their iterations.

A file is compiled with probes, which tell what has run and let `FastForward` end loops early. The text of the file, its
lines and its names stay as they are: a probe is a call of a builtin name.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

LOOP, COUNT, RAN = "__vramcast_loop__", "__vramcast_count__", "__vramcast_ran__"
"""Builtin names that compiled files call."""
EVALUATION, GENERATION, CHECKPOINT = "evaluation", "generation", "checkpoint"
_WITHOUT_GRADIENTS = frozenset({"no_grad", "inference_mode"})
_GENERATES = frozenset({"generate"})
_SAVES = frozenset({"save_pretrained", "save_model", "save_checkpoint", "save_state"})
_EVALUATES = frozenset({"evaluate", "validate"})
_EVALUATES_OF_TRAINER = frozenset({"test", "predict"})
_CALLED_BY_LIBRARIES = ("__", "on_", "forward")
"""Beginnings of the names of methods that a library calls."""
_TENSOR_METHODS = frozenset({
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "items", "keys", "values", "detach",
    "data_ptr", "size", "numel", "clone", "to", "cuda", "item", "append", "format", "print", "range", "zip", "len",
})  # fmt: skip
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.unaryop, ast.UnaryOp, ast.expr_context,
    ast.Subscript,
)  # fmt: skip
"""Nodes of expressions that may be evaluated without effects."""
_PLAIN_CALLS = frozenset({"len", "int", "max", "min"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mark:
    """A place of the user's code that begins an evaluation, a generation or a checkpoint."""

    kind: str
    place: str
    file: str
    function: str | None
    """The innermost function around it."""
    is_counted: bool
    """It runs in some iterations of a loop alone: a condition on numbers decides."""
    is_opaque: bool
    """The same, and the numbers are not known without running code of the script."""


@dataclass
class Counter:
    """A number that counts iterations: the expressions that it is divided by or compared with."""

    text: str
    divisors: list[ast.expr] = field(default_factory=list)
    bounds: list[ast.expr] = field(default_factory=list)


_Names = set[tuple[str, bool]]
"""Names that code uses, each with whether it is an attribute."""


@dataclass
class _File:
    used: _Names = field(default_factory=set)
    """At the level of the module."""
    functions: dict[str, _Names] = field(default_factory=dict)
    """By the name of the function that uses them."""


class ScriptSource:
    """Compiles the user's files, and knows their marks by number."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.main_modules: tuple[str, ...] = ()
        """Names of a module that is run as the script."""
        self._files: dict[str, _File] = {}

    def compiled(self, text: bytes | str, filename: str, *, is_main: bool) -> CodeType:
        """Return the code of a file with probes; without them where it is nested too deeply."""
        tree = ast.parse(text, filename)
        try:
            self._files[filename] = _names(tree, is_main)
            instrumented = ast.fix_missing_locations(_Probes(self, filename).visit(tree))
            return compile(instrumented, filename, "exec", dont_inherit=True)
        except RecursionError:
            return compile(text, filename, "exec", dont_inherit=True)

    def reachable_marks(self) -> Iterator[tuple[int, Mark]]:
        """Yield the marks in functions that code of the module level may come to, by their names."""
        reached: set[tuple[str, str]] = set()
        waiting = [
            (path, name)
            for path, file in self._files.items()
            for name in file.functions
            if name.startswith(_CALLED_BY_LIBRARIES)
        ]
        for path, file in self._files.items():
            waiting += self._meant(path, file.used)
        while waiting:
            place = waiting.pop()
            if place not in reached:
                reached.add(place)
                waiting += self._meant(place[0], self._files[place[0]].functions[place[1]])
        for number, mark in enumerate(self.marks):
            if mark.function is None or (mark.file, mark.function) in reached:
                yield number, mark

    def _meant(self, path: str, used: _Names) -> Iterator[tuple[str, str]]:
        """Yield the functions that names in a file may mean: its own one, or those of all files."""
        for name, is_attribute in used:
            if not is_attribute and name in self._files[path].functions:
                yield path, name
            else:
                yield from ((other, name) for other, file in self._files.items() if name in file.functions)


def _names(tree: ast.Module, is_main: bool) -> _File:
    file = _File()

    def collect(node: ast.AST, into: _Names) -> None:
        if isinstance(node, _FUNCTIONS):
            for decorator in node.decorator_list:
                collect(decorator, into)
            own = file.functions.setdefault(node.name, set())
            for child in (*node.body, node.args):
                collect(child, own)
            return
        if isinstance(node, ast.If) and not is_main and _is_main_guard(node.test):
            return
        if isinstance(node, ast.Name):
            into.add((node.id, False))
        elif isinstance(node, ast.Attribute):
            into.add((node.attr, True))
        for child in ast.iter_child_nodes(node):
            collect(child, into)

    collect(tree, file.used)
    return file


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


class _Probes(ast.NodeTransformer):
    """Adds probes to the tree of a file."""

    def __init__(self, source: ScriptSource, filename: str) -> None:
        self._source = source
        self._filename = filename
        self._function: list[str] = []
        self._scopes: list[dict[str, Counter]] = []
        self._loops = self._counted = self._opaque = self._loop_count = 0

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self._scopes.append(_counters_in(node))
        node.body = self._body(node.body, keep=_prologue(node.body))
        self._scopes.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function_with_probes(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function_with_probes(node)

    def _function_with_probes(self, node: Any) -> ast.AST:
        outer = self._loops, self._counted, self._opaque
        self._loops = self._counted = self._opaque = 0
        self._function.append(node.name)
        self._scopes.append(_counters_in(node))
        keep = _prologue(node.body)
        body = self._body(node.body, keep=keep)
        if any(_called_name(item) in _WITHOUT_GRADIENTS for item in node.decorator_list) and _runs_something(node):
            body.insert(keep, self._probe(EVALUATION, node))
        node.body = body
        self._scopes.pop()
        self._function.pop()
        self._loops, self._counted, self._opaque = outer
        return node  # type: ignore[no-any-return]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = self._body(node.body, keep=len(node.body), mark=False)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self._loops += 1
        node.body = self._body(node.body)
        self._loops -= 1
        node.orelse = self._body(node.orelse)
        if any(isinstance(item, ast.Call) for child in node.body for item in ast.walk(child)):
            self._loop_count += 1
            counter = self._counter(_counting_target(node))
            place = ast.Constant(f"{self._filename}:{node.lineno}:{self._loop_count}")
            arguments = [node.iter, place, *self._conditions(counter)]
            node.iter = ast.copy_location(ast.Call(ast.Name(LOOP, ast.Load()), arguments, []), node.iter)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self._loops += 1
        node.body = self._body(node.body)
        self._loops -= 1
        node.orelse = self._body(node.orelse)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        counted = self._loops > 0 and _is_counted(node.test)
        opaque = counted and not _is_known(node.test)
        self._counted += counted
        self._opaque += opaque
        node.body = self._body(node.body)
        node.orelse = self._body(node.orelse)
        self._counted -= counted
        self._opaque -= opaque
        return node

    def generic_visit(self, node: Any) -> ast.AST:
        """Visit the blocks of any other statement; expressions have no probes."""
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, self._body(getattr(node, name)))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self.generic_visit(part)
        return node  # type: ignore[no-any-return]

    def visit_With(self, node: ast.With) -> ast.AST:
        node.body = self._body(node.body)
        without = any(_called_name(item.context_expr) in _WITHOUT_GRADIENTS for item in node.items)
        if without and _runs_something(node):
            node.body.insert(0, self._probe(EVALUATION, node))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Let `step += 1` add more while the run is fast-forwarded."""
        text = _dotted(node.target)
        is_one = isinstance(node.value, ast.Constant) and type(node.value.value) is int and node.value.value == 1
        if text and is_one and isinstance(node.op, ast.Add):
            counter = self._counter(text)
            if counter is not None:
                current = ast.parse(text, mode="eval").body
                arguments = [current, ast.Constant(f"{self._filename}:{text}"), *self._conditions(counter)]
                node.value = ast.copy_location(ast.Call(ast.Name(COUNT, ast.Load()), arguments, []), node.value)
        return node

    def _counter(self, text: str | None) -> Counter | None:
        """Return a counter that something depends on, None for any other number."""
        return next((scope[text] for scope in reversed(self._scopes) if text in scope), None) if text else None

    def _conditions(self, counter: Counter | None) -> list[ast.expr]:
        """Return functions that evaluate what a counter is divided by and compared with.

        The frame's own `f_locals` would keep tensors alive.
        """
        lists = (counter.divisors, counter.bounds) if counter else ((), ())
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return [
            ast.Tuple([ast.Lambda(nothing, copy.deepcopy(item)) for item in expressions], ast.Load())
            for expressions in lists
        ]

    def _body(self, statements: list[ast.stmt], *, keep: int = 0, mark: bool = True) -> list[ast.stmt]:
        """Visit statements, with a probe before each that is marked; the first ones stay first."""
        body: list[ast.stmt] = []
        for index, statement in enumerate(statements):
            if mark and index >= keep and not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
                kinds = dict.fromkeys(kind for call in _own_calls(statement) if (kind := _kind(call)))
                body += [self._probe(kind, statement) for kind in kinds]
            visited = self.visit(statement)
            body.append(visited)
        return body

    def _probe(self, kind: str, node: Any) -> ast.stmt:
        place = f"{self._filename}:{node.lineno}"
        function = self._function[-1] if self._function else None
        self._source.marks.append(Mark(kind, place, self._filename, function, self._counted > 0, self._opaque > 0))
        number = len(self._source.marks) - 1
        call = ast.Expr(ast.Call(ast.Name(RAN, ast.Load()), [ast.Constant(number)], []))
        first: ast.stmt = ast.copy_location(call, node)
        return first


def _prologue(body: list[ast.stmt]) -> int:
    """Return how many statements must stay first: a docstring and imports from the future."""
    count = 0
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        count += 1
    return count


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement, without those of the statements and functions in it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, (ast.stmt, ast.Lambda, ast.excepthandler))
        ]


def _kind(call: ast.Call) -> str | None:
    name = _called_name(call)
    is_method = isinstance(call.func, ast.Attribute)
    if name in _GENERATES and is_method:
        return GENERATION
    if name in _SAVES or (name == "save" and ast.unparse(call.func).startswith("torch.")):
        return CHECKPOINT
    if name == "eval" and is_method and not call.args and not call.keywords:
        return EVALUATION
    if name in _EVALUATES or (name in _EVALUATES_OF_TRAINER and "trainer" in ast.unparse(call.func).lower()):
        return EVALUATION
    return None


def _called_name(node: ast.AST) -> str:
    """Return the last part of the name of a function, or of what a call calls."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _runs_something(node: Any) -> bool:
    """Return False where code only works on tensors, such as an average of weights."""
    for child in (call for item in node.body for call in ast.walk(item) if isinstance(call, ast.Call)):
        name = _called_name(child)
        base = child.func.value if isinstance(child.func, ast.Attribute) else None
        of_torch = isinstance(base, ast.Name) and base.id in ("torch", "np", "math")
        if name and not name.endswith("_") and name not in _TENSOR_METHODS and not of_torch:
            return True
    return False


def _counters_in(scope: Any) -> dict[str, Counter]:
    """Return the numbers of a function or module that are divided, or compared, with what can be evaluated."""
    counters: dict[str, Counter] = {}

    def of(node: ast.expr) -> Counter | None:
        text = _counted_text(node)
        return counters.setdefault(text, Counter(text)) if text else None

    for node in _walk_scope(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_plain(node.right):
            counter = of(node.left)
            if counter is not None:
                counter.divisors.append(node.right)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            for one, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                if _is_plain(other) and not isinstance(one, ast.Constant):
                    counter = of(one)
                    if counter is not None:
                        counter.bounds.append(other)
    return counters


def _walk_scope(scope: Any) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions in it; of a class's methods, where it is a module."""
    waiting = list(scope.body)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, _FUNCTIONS)]


def _counted_text(node: ast.expr) -> str | None:
    """Return the name in `step`, `self.step` or `(step + 1)`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and isinstance(node.right, ast.Constant):
        node = node.left
    return _dotted(node)


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else None
    return None


def _is_plain(node: ast.expr) -> bool:
    for item in ast.walk(node):
        if isinstance(item, ast.Call):
            if not isinstance(item.func, ast.Name) or item.func.id not in _PLAIN_CALLS or item.keywords:
                return False
        elif not isinstance(item, _PLAIN):
            return False
    return True


def _is_counted(test: ast.expr) -> bool:
    """Return True for a condition that holds in some iterations alone."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return True
        if isinstance(node, ast.Compare) and any(isinstance(item, _ORDERS) for item in node.ops):
            return True
    return False


def _is_known(test: ast.expr) -> bool:
    """Return True where each number that a counter is divided by or compared with can be evaluated."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not _is_plain(node.right):
            return False
        if isinstance(node, ast.Compare) and any(isinstance(item, _ORDERS) for item in node.ops):
            sides = (node.left, *node.comparators)
            if sum(map(_is_plain, sides)) < len(sides):
                return False
    return True


def _counting_target(node: ast.For) -> str | None:
    """Return the name that counts the iterations of a loop over numbers or over `enumerate`."""
    target = node.target
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return _dotted(target)
