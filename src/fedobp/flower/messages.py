"""Messages between server and nodes: a few plain values, and a payload in fedobp's wire format.

This module loads no torch: a node's app starts anew for every message.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedobp.errors import FedobpError, short

_VALUES, _PAYLOAD = "fedobp", "payload"


def pack(values: Mapping[str, Any], payload: bytes | None = None) -> RecordDict:
    """Return the content of a Flower message."""
    records: dict[str, Any] = {_VALUES: ConfigRecord({"json": json.dumps(values, allow_nan=False)})}
    if payload is not None:
        # Flower sends arrays in chunks; its serialisation of NumPy arrays is not used.
        records[_PAYLOAD] = ArrayRecord({_PAYLOAD: Array("uint8", (len(payload),), "fedobp.wire", payload)})
    return RecordDict(records)


def unpack(content: RecordDict, longest: float = math.inf) -> tuple[dict[str, Any], bytes]:
    """Return a message's values and payload; what is none of fedobp's, or longer than expected, is a user error."""
    try:
        text = content.config_records[_VALUES]["json"]
        size = sum(len(array.data) for record in content.array_records.values() for array in record.values())
        if size > longest or not isinstance(text, str) or len(text) > _LONGEST_JSON:
            raise FedobpError(f"a message of {size + len(str(text)):,} bytes is longer than any: it is not read")
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it is no object")
        payload = content.array_records[_PAYLOAD][_PAYLOAD].data if content.array_records else b""
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FedobpError(f"a message is not one of fedobp's ({short(error, 80)}): both sides must run it") from error
    return values, payload


_LONGEST_JSON = 1 << 26  # counts of an evaluation: a confusion matrix of 1,000 labels
