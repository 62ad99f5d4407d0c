"""Filters on metadata: equality, membership, ranges, and what is refused."""

import math
from typing import Any

import pytest

from searchrl_jax.retrieval.filters import MetadataTable

METADATA: list[dict[str, Any]] = [
    {"package": "numpy", "year": 2019, "tags": ["linalg", "norm"]},
    {"package": "scipy", "year": 2021, "tags": []},
    {"package": "numpy", "year": "2020", "ready": True},
    {"year": 2020.5, "count": 1, "note": None, "score": math.nan},
]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({"package": "numpy"}, [0, 2]),
        ({"package": ["numpy", "scipy"]}, [0, 1, 2]),
        ({"package": ("scipy",)}, [1]),
        ({"package": []}, []),
        ({"package": "numpy", "year": 2019}, [0]),
        ({"year": 2019, "package": "numpy"}, [0]),
        ({"tags": "norm"}, [0]),
        ({"tags": ["norm", "fft"]}, [0]),
        ({"year": {"gte": 2019, "lte": 2021}}, [0, 1, 3]),
        ({"year": {"gte": 2020}}, [1, 3]),
        ({"year": {"lte": 2019.0}}, [0]),
        ({"year": {"gte": 2021, "lte": 2019}}, []),
        ({"year": {"gte": "2000"}}, [2]),
        ({"tags": {"gte": "m"}}, [0]),
        ({"ready": True}, [2]),
        ({"ready": 1}, []),
        ({"count": True}, []),
        ({"count": 1.0}, [3]),
        ({"note": ["x"]}, []),
        ({"score": {"gte": -1e9}}, []),
        ({"absent": "x"}, []),
        ({"absent": {"gte": 0}}, []),
    ],
)
def test_rows_admitted(where: dict[str, Any], rows: list[int]) -> None:
    mask = MetadataTable(METADATA).admitted(where)
    assert mask is not None
    assert mask.nonzero()[0].tolist() == rows


def test_no_condition_is_no_mask() -> None:
    assert MetadataTable(METADATA).admitted(None) is None
    assert MetadataTable(METADATA).admitted({}) is None


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("package:numpy", "must map"),
        ({"year": {"gt": 3}}, "gte.*got the names.*gt"),
        ({"year": {}}, "gte"),
        ({"year": {"gte": 3, "lte": "4"}}, "both"),
        ({"year": {"gte": math.nan}}, "bound"),
        ({"year": {"gte": None}}, "bound"),
        ({"package": None}, "expected a string"),
        ({"package": [["numpy"]]}, "expected a string"),
        ({"package": {"numpy"}}, "expected a string"),
        ({3: "numpy"}, "field name"),
    ],
)
@pytest.mark.parametrize("metadata", [METADATA, []])
def test_malformed_conditions_are_refused_whatever_the_collection(
    where: Any, message: str, metadata: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=message):
        MetadataTable(metadata).admitted(where)
