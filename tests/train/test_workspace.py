"""What a run stands on stays what it began with."""

from dataclasses import replace
from pathlib import Path

import pytest

from searchrl_jax.testing.tiny import tiny_documents, tiny_tasks
from searchrl_jax.train.workspace import _claim_data


def test_a_run_goes_on_with_the_data_that_it_began_with_alone(tmp_path: Path) -> None:
    path, documents, tasks = tmp_path / "data.json", tiny_documents(), tiny_tasks()
    splits = {"train": tasks[:2], "validation": tasks[2:3], "test": tasks[3:]}
    for _ in range(2):
        _claim_data(path, documents, splits)
    judged_otherwise = [replace(tasks[3], relevance={documents[0].doc_id: 0.5}), *tasks[4:]]
    with pytest.raises(ValueError, match="run began with other test tasks .*another --workdir"):
        _claim_data(path, documents, splits | {"test": judged_otherwise})
    with pytest.raises(ValueError, match="run began with other documents, train tasks"):
        _claim_data(path, [replace(documents[0], text="new"), *documents[1:]], splits | {"train": tasks[:1]})
    _claim_data(path, documents, splits)
    path.write_text("{")
    with pytest.raises(ValueError, match="data.json: expected what a run wrote there"):
        _claim_data(path, documents, splits)
