"""Pair: inputs and targets, two sides, for sequence to sequence."""

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.errors import InvalidValue
from pipeline.text.fingerprints import fingerprint
from pipeline.text.source import text_of
from pipeline.text.template import Template, apply, traits_of


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The inputs and the targets of a record, two sides, for sequence to sequence.

    >>> Pair(inputs="de", targets="en")({"de": "ja", "en": "yes"})
    {'inputs': [('ja', 1.0)], 'targets': [('yes', 1.0)]}

    Attributes:
        inputs: the field of the text, or a template.
        targets: the same; a template decides which tokens carry loss.
    """

    inputs: str | Template
    targets: str | Template

    takes_bytes: ClassVar = True
    sides: ClassVar = ("inputs", "targets")

    def __post_init__(self) -> None:
        for side in (self.inputs, self.targets):
            if traits_of(side).nodes > 1 or traits_of(side).sides:
                raise InvalidValue(
                    f"the template {fingerprint(side)} makes groups or sides, and one of inputs or "
                    "of targets makes a list of spans; give it to prepare alone"
                )

    @classmethod
    def of(cls, fields: Any) -> "Pair":
        """The template of two fields or templates, of inputs and targets."""
        if len(fields) != 2 or isinstance(fields, str):
            raise InvalidValue(
                f"fields is {fields!r}; it must be two, of the inputs and of the targets"
            )
        return cls(inputs=fields[0], targets=fields[1])

    @property
    def fields(self) -> dict[str, str] | None:
        """The field of each side, if both are fields."""
        if isinstance(self.inputs, str) and isinstance(self.targets, str):
            return {"inputs": self.inputs, "targets": self.targets}
        return None

    @property
    def unweighted(self) -> bool:
        """Whether all tokens of the targets carry loss."""
        return isinstance(self.targets, str)

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        """The spans of both sides of a record."""
        return {
            name: [(text_of(record, side), 1.0)] if isinstance(side, str) else apply(side, record)
            for name, side in (("inputs", self.inputs), ("targets", self.targets))
        }
