"""Every import of a source text, found by parsing it."""

import ast


def imports(source: str, package: str = "") -> dict[str, int]:
    """Absolute dotted names that ``source`` imports, with their lines. ``package`` resolves relative imports.

    ``from a.b import c`` counts as ``a.b.c``, because c may be a module. Imports inside functions and under
    ``if TYPE_CHECKING`` count too, and so does ``importlib.import_module`` with a literal name.
    """
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name: node.lineno for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                found |= {f"{base}.{alias.name}": node.lineno for alias in names}
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module")):
                if isinstance(node.args[0], ast.Constant):
                    found[str(node.args[0].value)] = node.lineno
    return found
