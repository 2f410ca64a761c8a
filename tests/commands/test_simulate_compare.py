"""``simulate compare``: real runs beside simulated ones."""

from pathlib import Path

import pytest

WORKLOAD = Path(__file__).parents[1] / "simulation" / "truth" / "workload.json"

pytestmark = pytest.mark.usefixtures("own_logging")


def test_runs_of_a_server_are_held_against_simulated_ones(run, tmp_path):
    """A Markdown table, a row per run."""
    path = tmp_path / "runs.csv"
    path.write_text(
        "mode,num_gpu_blocks,block_size,max_num_seqs,watermark,preemptions,engine_steps,output_tokens,"
        "peak_kv_usage\nburst,300,32,16,0.0,0,2199,30589,0.9766\n"
    )
    status, out, _ = run("simulate", "compare", path, "--workload", WORKLOAD)
    *_, row = out.splitlines()
    assert status == 0
    assert row == "| burst | 300 | 16 | 0 | 0 | 0 | 2199 | 2199 (+0.0%) | 0.977 | 0.997 |"


def test_a_table_of_runs_without_a_column_is_named(run, tmp_path):
    """With the columns that are expected."""
    path = tmp_path / "runs.csv"
    path.write_text("mode,num_gpu_blocks\nburst,300\n")
    status, _, err = run("simulate", "compare", path, "--workload", WORKLOAD)
    assert status == 2
    assert "block_size is missing" in err
