"""Values that cannot end, such as a list node that must have a next node: llguidance would begin one.

No finite text fits them.

Found as the values of a grammar are that derive no word: what can end for certain is collected until nothing is added.
"""

from collections import defaultdict, deque
from typing import Any

from nanovllm.features.grammar.parts import Parts, alternatives_of, list_in, map_in, own_parts, values_inside, values_of


def without_endless(root: dict[str, Any]) -> dict[str, Any]:
    """The schema with false in the place of each value that cannot end. Raises ValueError if none is left."""
    ends = Ends(root)
    if not ends.known(root):
        names = sorted({part["$ref"] for part in ends.schemas if "$ref" in part and not ends.known(part)})
        around = f" (see {', '.join(names[:3])})" if names else ""
        raise ValueError(f"no finite text fits it: what it requires contains itself without an end{around}")
    return root if ends.all_do else ends.kept(root)


class Ends:
    """Which schemas of a root can be fitted by a finite text, as far as references and required values say."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.parts = Parts(root)
        self.schemas = [part for value in values_of(root) for part in own_parts(value)]
        self._known: set[int] = set()
        self._waiting: dict[int, list[dict[str, Any]]] = defaultdict(list)
        todo = deque(reversed(self.schemas))
        while todo:
            schema = todo.popleft()
            if id(schema) not in self._known and self._can_end(schema):
                self._known.add(id(schema))
                todo.extend(self._waiting.pop(id(schema), ()))

    @property
    def all_do(self) -> bool:
        return all(map(self.known, self.schemas))

    def known(self, schema: Any) -> bool:
        return schema is not False and (not isinstance(schema, dict) or id(schema) in self._known)

    def kept(self, schema: Any) -> Any:
        """A copy, without what cannot end."""
        if isinstance(schema, list):
            return [self.kept(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        inside = {id(each) for each in values_inside(schema)} | {id(each) for each in own_parts(schema)}
        return {key: self._kept_inside(value, inside) for key, value in schema.items()}

    def _kept_inside(self, value: Any, inside: set[int]) -> Any:
        """What stands under a key: a schema, a list or a map of schemas, or data."""
        if id(value) in inside:
            return self.kept(value) if self.known(value) else False
        if isinstance(value, list):
            return [self._kept_inside(each, inside) if id(each) in inside else each for each in value]
        if isinstance(value, dict):
            return {key: self._kept_inside(each, inside) if id(each) in inside else each for key, each in value.items()}
        return value

    def _can_end(self, schema: dict[str, Any]) -> bool:
        def asked(other: Any) -> bool:
            if not self.known(other):
                self._waiting[id(other)].append(schema)
            return self.known(other)

        def fits(parts: list[dict[str, Any]], new: list[dict[str, Any]]) -> bool:
            """Can a value end of which all these parts hold? new: those whose references were not followed before."""
            targets = [self.parts.target_of(part) for part in new]
            return all(target is None or asked(target) for target in targets) and all(map(asked, _required(parts)))

        parts = self.parts.parts_of(schema)
        if not fits(parts, parts):
            return False
        for branches in alternatives_of(parts):
            own = [self.parts.parts_of(branch) for branch in branches]
            if not any(asked(branch) and fits(parts + new, new) for branch, new in zip(branches, own, strict=True)):
                return False
        return True


def _required(parts: list[dict[str, Any]]) -> list[Any]:
    """Schemas of the values that an object or an array has in any case, if it is one."""
    kinds = [part.get("type") for part in parts]
    found: list[Any] = []
    if "object" in kinds or ["object"] in kinds:
        names = {name for part in parts for name in list_in(part, "required") if isinstance(name, str)}
        for part in parts:
            found += [value for name, value in map_in(part, "properties").items() if name in names]
    if "array" in kinds or ["array"] in kinds:
        least = max((part["minItems"] for part in parts if isinstance(part.get("minItems"), int)), default=0)
        for part in parts:
            first = list_in(part, "prefixItems") or list_in(part, "items")
            found += first[:least]
            if len(first) < least and isinstance(part.get("items"), dict):
                found.append(part["items"])
    return [value for value in found if value is not False]  # llguidance says what is wrong with that
