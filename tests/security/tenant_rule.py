"""The tenant rule, read from the source: who may query a model, and that a query says whose rows.

1. Only a repository queries a mapped model (`select(Adapter)`, `session.get(Adapter, …)`, joins).
2. In a repository, a function that queries a tenant's model uses a tenant's id: a parameter
   `tenant_id` (or `owner_id`, `caller_id`), or an object's, such as `entry.tenant_id`.
   Where that cannot be, its docstring says so by a marker and gives the reason:

       Of any tenant: for the worker, which has only the id.
       By its parent: the adapter was found by its tenant.

A tenant's model has one of those columns, or a foreign key to the table of one that has.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWNER_COLUMNS = frozenset({"tenant_id", "owner_id", "caller_id"})
QUERIES = frozenset(
    {
        "select",
        "insert",
        "update",
        "delete",
        "get",
        "get_one",
        "merge",
        "query",
        "exists",
        "aliased",
        "select_from",
        "join",
        "outerjoin",
    }
)
MARKER = re.compile(r"(Of any tenant|By its parent): \S+ \S+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Problem:
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}"


def problems(package: Path) -> list[Problem]:
    """Every breach below the package, by file and line."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    models = [
        node
        for path, tree in trees.items()
        if path.name == "models.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and table_of(node) is not None
    ]
    mapped = {model.name for model in models}
    owned = owned_models(models)
    found = []
    for path, tree in trees.items():
        name = str(path.relative_to(package.parent))
        if path.stem.endswith("repository"):
            found += [Problem(name, *breach) for breach in _without_tenant(tree, owned)]
        else:
            found += [
                Problem(
                    name, node.lineno, f"queries {', '.join(sorted(asked))} outside a repository"
                )
                for node in ast.walk(tree)
                if (asked := queried(node, mapped))
            ]
    return found


def owned_models(models: list[ast.ClassDef]) -> set[str]:
    """Names of the models whose rows belong to a tenant, through foreign keys too."""
    owned = {model.name for model in models if OWNER_COLUMNS & set(_columns(model))}
    while True:
        tables = {table_of(model) for model in models if model.name in owned}
        more = {model.name for model in models if tables & set(_references(model))} - owned
        if not more:
            return owned
        owned |= more


def table_of(model: ast.ClassDef) -> str | None:
    for node in model.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__tablename__"
            and isinstance(node.value, ast.Constant)
        ):
            return str(node.value.value)
    return None


def _columns(model: ast.ClassDef) -> Iterator[str]:
    for node in model.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _references(model: ast.ClassDef) -> Iterator[str]:
    """Tables that its foreign keys name."""
    for node in ast.walk(model):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ForeignKey"):
            target = node.args[0]
            if isinstance(target, ast.Constant):
                yield str(target.value).partition(".")[0]


def queried(node: ast.AST, models: set[str]) -> set[str]:
    """Models that a call asks for: `select(Adapter.id)`, `session.get(Adapter, id)`."""
    if not isinstance(node, ast.Call):
        return set()
    if ast.unparse(node.func).rpartition(".")[2] not in QUERIES:
        return set()
    return {
        name.id
        for argument in node.args
        for name in ast.walk(argument)
        if isinstance(name, ast.Name) and name.id in models
    }


def _without_tenant(tree: ast.Module, owned: set[str]) -> Iterator[tuple[int, str]]:
    for function in tree.body:
        asked = {name for node in ast.walk(function) for name in queried(node, owned)}
        if not asked:
            continue
        whose = f"queries {_listed(asked)}"
        if not isinstance(function, Function):
            yield function.lineno, f"{whose} outside a function"
        elif not _uses_tenant(function) and not _is_marked(function):
            yield function.lineno, f"{function.name} {whose} and says not of which tenant"


def _uses_tenant(function: Function) -> bool:
    arguments = function.args
    given = {
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if argument.arg in OWNER_COLUMNS
    }
    for node in ast.walk(ast.Module(function.body, [])):
        if isinstance(node, ast.Name) and node.id in given:
            return True
        if isinstance(node, ast.Attribute) and node.attr in OWNER_COLUMNS:
            base = node.value
            if isinstance(base, ast.Name) and base.id[0].islower():
                return True
    return False


def _is_marked(function: Function) -> bool:
    return MARKER.search(ast.get_docstring(function) or "") is not None


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
