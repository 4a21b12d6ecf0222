"""Fitting: the shapes that `load` chooses, and a record of how, which data states have.

Fitted shapes depend on the number of devices, so on another number they would be others. A run goes
on with the shapes of its state, and a state of other shapes is refused with the reason.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pipeline.errors import InvalidValue, counted
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.sharding import ContextOrder, multiples
from pipeline.planning.bucket import Bucket
from pipeline.planning.fit import fit_buckets
from pipeline.planning.options import list_keywords, select_options
from pipeline.planning.plan import PLANNING

FITTING = list_keywords(fit_buckets)

# Options that choose shapes and are none of a plan. Those for devices may differ between starts.
CHOOSING = [name for name in FITTING if name not in PLANNING]
OF_DEVICES = "row_multiple", "devices"


class Shapes(NamedTuple):
    """Buckets; and how they were chosen, as JSON: options, and `devices`. None: they were given."""

    buckets: Collection[Bucket]
    fitted: dict[str, Any] | None = None


def fit_shapes(
    lengths: Any, sharding: Any, context_order: ContextOrder, options: Mapping[str, Any]
) -> Shapes:
    """Buckets that divide over the devices of `sharding`; `options` are those of `load`."""
    rows, length = multiples(sharding, context_order)
    several = math.lcm(128, length) if length > 1 else None
    multiple: dict[str, Any] = {"row_multiple": rows, "length_multiple": several}
    devices = rows
    if isinstance(sharding, DynamicContext):
        devices = multiple["devices"] = sharding.devices
    fitting = {"max_buckets": 4, **multiple, **options}
    buckets = fit_buckets(lengths, **select_options(FITTING, fitting))
    choices = _list_choices({"max_buckets": 4, **options})
    return Shapes(buckets, choices | {"devices": devices})


def keep_shapes(
    saved: Shapes, options: Mapping[str, Any], sharding: Any, context_order: ContextOrder
) -> Shapes:
    """The shapes of a state, if these options choose them, and the devices can share their rows.

    Raises:
        ValueError: an option, but for those that serve the devices, had another value when the
            shapes were chosen; or rows do not divide over the devices.
    """
    then, now = saved.fitted or {}, _list_choices(options)
    shapes = "+".join(map(str, saved.buckets))
    changes = [
        f"{name} was {then.get(name, 'not given')} and is now {value}"
        for name, value in now.items()
        if name not in OF_DEVICES and then.get(name) != value
    ]
    if changes:
        raise InvalidValue(
            f"{'; '.join(changes)}, but the shapes are those of the state, {shapes}; leave these "
            "options as they were, or omit them"
        )
    rows, _ = multiples(sharding, context_order)
    if any(bucket.rows % rows for bucket in saved.buckets):
        most = math.gcd(*(bucket.rows for bucket in saved.buckets))
        number = f"a number of devices that divides {most} for them" if most > 1 else "one device"
        raise InvalidValue(
            f"the shapes of the state are {shapes}, whose rows do not all divide over {rows} "
            "devices; give sharding=pipeline.DynamicContext(mesh), which also divides the length "
            f"of rows, or a mesh with {number}; row_multiple=8 at the beginning chooses others"
        )
    return saved


def explain_shapes(
    changes: Collection[str], then: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> str:
    """Why fitted shapes are not those of a state, and the cure; empty if more than shapes differ.

    `changes` are the `differences` of the state; `then` and `now` say how shapes were chosen.
    """
    if now is None or not all(change.startswith("buckets was ") for change in changes):
        return ""
    before = "" if then is None else f", and those of the state to {then['devices']}"
    return (
        f"the shapes of this loader are fitted to {counted(now['devices'], 'device')}{before}. To "
        "continue with those of the state, give it to load as well: load(…, state=state)"
    )


def _list_choices(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that choose shapes, as JSON."""
    chosen = select_options(CHOOSING, options)
    plain: dict[str, Any] = json.loads(json.dumps(chosen, default=int))
    return {name: value for name, value in plain.items() if value is not None}
