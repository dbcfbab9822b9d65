"""Workloads from trace files: formats, windows, malformed files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_gym.config import CONFIGS, TraceWorkload
from opal_gym.sim.workloads import TraceError, Workload, make_workload
from opal_gym.sim.workloads.traces import read_trace

REPOSITORY = Path(__file__).parents[1]
RECORDED = Path(__file__).parents[2] / "shared/data/traces"
SAMPLES = CONFIGS / "samples"

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
# Requests at 0, 1.5, 1.5 and 10 s.
AZURE = f"""{AZURE_HEADER}
2023-11-16 18:15:46.5000000,374,44
2023-11-16 18:15:48.0000000,396,109
2023-11-16 18:15:48.0000000,879,55
2023-11-16 18:15:56.5000000,91,16
"""


def trace(path: Path, text: str | bytes, **values: Any) -> TraceWorkload:
    """The configuration of a trace file with this content."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return TraceWorkload.model_validate({"format": "azure", "path": str(path), **values})


def lengths(path: Path, rows: int = 100, **values: Any) -> TraceWorkload:
    """The configuration of a file of `rows` lengths; row i has the prompt length i + 1."""
    text = "input_length,output_length\n" + "".join(f"{i + 1},7\n" for i in range(rows))
    arrivals = {"rate_per_s": 5.0, **values.pop("arrivals", {})}
    return trace(path, text, format="lengths", arrivals=arrivals, **values)


def mooncake_row(timestamp: Any = 0, tokens: int = 3, **values: Any) -> str:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": [0]}
    return json.dumps({**row, **values}) + "\n"


def mooncake(path: Path, timestamps: list[int], **values: Any) -> TraceWorkload:
    text = "".join(mooncake_row(timestamp) for timestamp in timestamps)
    return trace(path, text, format="mooncake", **values)


def make(config: TraceWorkload, seed: int = 0, **arguments: Any) -> Workload:
    return make_workload(config, seed, **{"length_information": "predicted", **arguments})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


# --- formats -------------------------------------------------------------------------------------


def test_azure(path: Path) -> None:
    config = trace(path, AZURE, tenant="chat", weight=2.0, slo="interactive", priority=3)
    workload = make(config, length_information="oracle")
    assert workload.arrival_time.tolist() == [0.0, 1.5, 1.5, 10.0]
    assert workload.prompt_tokens.tolist() == [374, 396, 879, 91]
    assert workload.output_tokens.tolist() == [44, 109, 55, 16]
    assert workload.predicted_output_tokens.tolist() == [44, 109, 55, 16]
    assert workload.priority.tolist() == [3] * 4
    assert workload.hash_ids == ()
    assert workload.left_out == {}
    (tenant,) = workload.tenants
    assert (tenant.name, tenant.weight) == ("chat", 2.0)
    assert (tenant.ttft_slo_s, tenant.tpot_slo_s) == (0.5, 0.03)


def test_mooncake(path: Path) -> None:
    """1025 tokens are three blocks of 512."""
    rows = mooncake_row(0, 1025, hash_ids=[0, 1, 2]) + mooncake_row(2500.5, 512, hash_ids=[0])
    workload = make(trace(path, rows, format="mooncake"))
    assert workload.arrival_time.tolist() == [0.0, 2.5005]
    assert workload.prompt_tokens.tolist() == [1025, 512]
    assert workload.hash_ids == ((0, 1, 2), (0,))


def test_lengths_get_arrivals(path: Path) -> None:
    config = lengths(path, rows=1000, arrivals={"load": 0.8}, rate_scale=2.0)
    workload = make(config, rate_scale=1.5)
    assert workload.prompt_tokens.tolist() == list(range(1, 1001))
    # 1,000 requests at 5/s · 0.8 · 2 · 1.5 = 12/s; 4 standard errors of 1/√1000.
    assert workload.load == pytest.approx(2.4)
    assert workload.arrival_time[-1] == pytest.approx(1000 / 12, rel=0.13)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_gzip_is_known_by_its_first_bytes_whatever_the_name(tmp_path: Path, name: str) -> None:
    config = trace(tmp_path / name, gzip.compress(AZURE.encode()))
    assert len(make(config)) == 4


def test_byte_order_mark_carriage_returns_and_blank_lines_are_tolerated(path: Path) -> None:
    text = "\ufeff" + AZURE.replace("\n", "\r\n") + "\r\n\r\n"
    assert make(trace(path, text)).prompt_tokens.tolist() == [374, 396, 879, 91]


def test_columns_are_found_by_name(path: Path) -> None:
    text = "GeneratedTokens,Model,TIMESTAMP,ContextTokens\n44,m,2023-11-16 18:15:46,374\n"
    workload = make(trace(path, text))
    assert (workload.prompt_tokens.tolist(), workload.output_tokens.tolist()) == ([374], [44])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2023-11-16 18:15:47", 0.5),
        ("2023-11-16 18:15:46.6805900", 0.18059),
        ("2023-11-16 18:15:46.500000001", 1e-9),
        ("2023-11-16 18:15:46.75+00:00", 0.25),  # as in the traces of 2024
        ("2023-11-17T18:15:46.5Z", 86400.0),
    ],
)
def test_azure_times(path: Path, text: str, seconds: float) -> None:
    config = trace(path, f"{AZURE_HEADER}\n2023-11-16 18:15:46.5,1,1\n{text},1,1\n")
    assert make(config).arrival_time[1] == seconds


def test_a_changed_file_is_read_again(path: Path) -> None:
    assert len(make(trace(path, AZURE))) == 4
    assert len(make(trace(path, AZURE + "2023-11-16 18:15:57,5,5\n"))) == 5


# --- bins ----------------------------------------------------------------------------------------


def test_requests_of_a_bin_are_spread_over_its_three_seconds(path: Path) -> None:
    """Two requests at 0, one at 3, three at 6 s: gaps of 3/2 and 3/3 s."""
    config = mooncake(path, [0, 0, 3000, 6000, 6000, 6000])
    assert make(config).arrival_time.tolist() == [0.0, 1.5, 3.0, 6.0, 7.0, 8.0]


def test_a_bin_ends_where_the_next_begins(path: Path) -> None:
    """Recorded bins last 2.997 to 3.003 s; equal times 1 s before the next are 1/2 s apart."""
    assert make(mooncake(path, [0, 0, 1000, 9000])).arrival_time.tolist() == [0.0, 0.5, 1.0, 9.0]


def test_bins_are_kept_when_asked(path: Path) -> None:
    config = mooncake(path, [0, 0, 3000], spread_bins=False)
    assert make(config).arrival_time.tolist() == [0.0, 0.0, 3.0]


# --- windows -------------------------------------------------------------------------------------


def test_a_window_starts_at_zero_and_ends_before_its_last_instant(path: Path) -> None:
    """Rows at 0, 1.5, 1.5 and 10 s; [1, 10) holds two, [1.5, 10.5) three."""
    window = make(trace(path, AZURE, window_start_s=1.0, window_s=9.0))
    assert window.arrival_time.tolist() == [0.5, 0.5]
    assert window.prompt_tokens.tolist() == [396, 879]
    window = make(trace(path, AZURE, window_start_s=1.5, window_s=9.0))
    assert window.arrival_time.tolist() == [0.0, 0.0, 8.5]


def test_rates_are_scaled_after_the_window_is_cut(path: Path) -> None:
    config = trace(path, AZURE, window_start_s=1.0, window_s=9.5, rate_scale=2.0)
    workload = make(config, rate_scale=1.25)
    assert workload.arrival_time.tolist() == [0.2, 0.2, 3.6]  # 0.5, 0.5 and 9 s, divided by 2.5
    assert workload.load == 2.5


def test_number_of_requests_is_capped(path: Path) -> None:
    config = trace(path, AZURE, window_start_s=1.0, num_requests=2)
    assert make(config).prompt_tokens.tolist() == [396, 879]


def test_a_drawn_window_is_whole_and_uniform(path: Path) -> None:
    """1,001 rows, one a second: windows of 100 s start between 0 and 900 s and hold 100 rows."""
    config = mooncake(path, list(range(0, 1_000_001, 1000)), window_s=100.0, window_start_s=None)
    windows = [make(config, seed) for seed in range(200)]
    assert {len(window) for window in windows} == {100}
    assert all(0 <= window.arrival_time[0] < 1 for window in windows)
    assert make(config, 7).arrival_time.tolist() == windows[7].arrival_time.tolist()
    # The fraction of a uniform start is uniform: mean 1/2, standard error 0.289 / √200 = 0.02.
    assert np.mean([window.arrival_time[0] for window in windows]) == pytest.approx(0.5, abs=0.08)


def test_a_drawn_window_without_a_length_leaves_the_number_of_requests(path: Path) -> None:
    text = AZURE_HEADER + "".join(
        f"\n2023-11-16 18:{minute:02}:00,{minute + 1},1" for minute in range(60)
    )
    config = trace(path, text, num_requests=20, window_start_s=None)
    firsts = []
    for seed in range(200):
        prompts = make(config, seed).prompt_tokens
        assert prompts.tolist() == list(range(prompts[0], prompts[0] + 20))
        firsts.append(prompts[0])
    # Starts in [0, 40) minutes: the first row is that of minute 1 … 40; mean 20.5, sd 11.5.
    assert (min(firsts), max(firsts)) == pytest.approx((2, 41), abs=2)
    assert np.mean(firsts) == pytest.approx(21.5, abs=4 * 11.5 / np.sqrt(200))


def test_a_drawn_window_longer_than_the_trace_is_the_whole_trace(path: Path) -> None:
    for limit in ({"window_s": 100.0}, {"num_requests": 100}, {}):
        config = trace(path, AZURE, window_start_s=None, **limit)
        assert make(config).arrival_time.tolist() == [0.0, 1.5, 1.5, 10.0]


def test_lengths_have_windows_of_rows(path: Path) -> None:
    first = make(lengths(path, num_requests=20))
    assert first.prompt_tokens.tolist() == list(range(1, 21))
    config = lengths(path, num_requests=20, window_start_s=None)
    starts = []
    for seed in range(300):
        prompts = make(config, seed).prompt_tokens
        assert prompts.tolist() == list(range(prompts[0], prompts[0] + 20))
        starts.append(prompts[0])
    assert (min(starts), max(starts)) == pytest.approx((1, 81), abs=2)


def test_lengths_have_no_windows_of_time(path: Path) -> None:
    for window in ({"window_s": 5.0}, {"window_start_s": 5.0}):
        with pytest.raises(ValueError, match=r"window_\w+: got .*; allowed: .* has no times"):
            lengths(path, **window)


def test_load_moves_neither_rows_nor_predictions(path: Path) -> None:
    config = lengths(path, num_requests=20, window_start_s=None)
    slow, fast = make(config, 3), make(config, 3, rate_scale=2.0)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)
    assert np.array_equal(slow.predicted_output_tokens, fast.predicted_output_tokens)
    assert np.array_equal(slow.arrival_time / 2, fast.arrival_time)


# --- rows left out -------------------------------------------------------------------------------


def test_long_requests_are_left_out_and_counted(path: Path) -> None:
    """Prompt + output: 418, 505, 934 and 107 tokens."""
    workload = make(trace(path, AZURE, max_tokens=505))
    assert workload.prompt_tokens.tolist() == [374, 396, 91]
    assert workload.arrival_time.tolist() == [0.0, 1.5, 10.0]
    assert workload.left_out == {"more than 505 tokens": 1}


def test_long_requests_are_counted_in_the_window_only(path: Path) -> None:
    for window in ({"window_s": 1.0}, {"num_requests": 2}, {"window_start_s": 2.0}):
        assert make(trace(path, AZURE, max_tokens=505, **window)).left_out == {}


def test_spreading_counts_the_requests_that_are_left_out(path: Path) -> None:
    rows = mooncake_row(0) + mooncake_row(0, 9) + mooncake_row(0)
    assert make(trace(path, rows, format="mooncake", max_tokens=10)).arrival_time.tolist() == [0, 2]


def test_skipped_rows_are_counted(path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:55,1,1\n2023-11-16 18:15:57,1,0\nx\n2023-11-16 18:15:58,1,2\n"
    workload = make(trace(path, text, on_error="skip"))
    assert workload.arrival_time.tolist() == [0.0, 1.5, 1.5, 10.0, 11.5]
    assert workload.left_out == {"malformed": 3}


def test_a_trace_without_requests_says_why(path: Path) -> None:
    config = trace(path, AZURE + "x\n", on_error="skip", max_tokens=100, window_s=5.0)
    with pytest.raises(TraceError) as error:
        make(config)
    assert str(error.value) == (
        f"{path}: got no request of 5 rows (1 malformed, 3 more than 100 tokens, "
        "1 outside the window); allowed: at least one"
    )
    for nothing in (AZURE_HEADER, f"{AZURE_HEADER}\nx\n"):
        for window_start_s in (0.0, None):
            for window_s in (1.0, None):
                window = {"window_s": window_s, "window_start_s": window_start_s}
                with pytest.raises(TraceError, match="got no request of"):
                    make(trace(path, nothing, on_error="skip", num_requests=3, **window))


# --- malformed rows ------------------------------------------------------------------------------

COUNT = "an integer from 1 to 2147483647"
UTC = "a UTC time like 2023-11-16 18:15:46.6805900"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:57,12", "GeneratedTokens: missing; allowed: 3 fields"),
        (
            "2023-11-16 18:15:57,1,2,3",
            "row: got '2023-11-16 18:15:57,1,2,3'; allowed: 3 fields",
        ),
        ("2023-11-16 18:15:57,1.5,2", f"ContextTokens: got '1.5'; allowed: {COUNT}"),
        ("2023-11-16 18:15:57,1,-2", f"GeneratedTokens: got '-2'; allowed: {COUNT}"),
        ("2023-11-16 18:15:57,1,0", f"GeneratedTokens: got 0; allowed: {COUNT}"),
        ("2023-11-16 18:15:57,nan,2", f"ContextTokens: got 'nan'; allowed: {COUNT}"),
        ("2023-11-16 18:15:57,,2", f"ContextTokens: got ''; allowed: {COUNT}"),
        ("2023-11-16 18:15:57,1_0,2", f"ContextTokens: got '1_0'; allowed: {COUNT}"),
        ("2023-11-16 18:15:57,٣,2", f"ContextTokens: got '٣'; allowed: {COUNT}"),
        (
            "2023-11-16 18:15:57,99999999999999999999,2",
            f"ContextTokens: got '99999999999999999999'; allowed: {COUNT}",
        ),
        ("yesterday,1,2", f"TIMESTAMP: got 'yesterday'; allowed: {UTC}"),
        ("2023-13-16 18:15:57,1,2", f"TIMESTAMP: got '2023-13-16 18:15:57'; allowed: {UTC}"),
        (
            "2023-11-16 18:15:56,1,2",
            "timestamp: got 0.5 s before the row above; allowed: times in order",
        ),
    ],
)
def test_malformed_azure_rows(path: Path, row: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        make(trace(path, f"{AZURE}{row}\n"))
    assert str(error.value) == f"{path}:6: {message}"
    assert make(trace(path, f"{AZURE}{row}\n", on_error="skip")).left_out == {"malformed": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"timestamp": 0', "row: got '{\"timestamp\": 0'; allowed: a JSON object"),
        ("[1, 2]", "row: got '[1, 2]'; allowed: a JSON object"),
        ("[" * 100_000, "row: got '" + "[" * 59 + "; allowed: a JSON object"),
        ('{"timestamp": 9}', "input_length: missing; allowed: a value in every row"),
        (mooncake_row(9, output_length=True), f"output_length: got True; allowed: {COUNT}"),
        (mooncake_row(9, output_length="2"), f"output_length: got '2'; allowed: {COUNT}"),
        (mooncake_row(9, output_length=2.5), f"output_length: got 2.5; allowed: {COUNT}"),
        (mooncake_row(9, output_length=-1), f"output_length: got -1; allowed: {COUNT}"),
        (mooncake_row(9, output_length=None), f"output_length: got None; allowed: {COUNT}"),
        (mooncake_row("9"), "timestamp: got '9'; allowed: milliseconds, at least 0"),
        (mooncake_row(-1), "timestamp: got -1; allowed: milliseconds, at least 0"),
        (mooncake_row(float("nan")), "timestamp: got nan; allowed: milliseconds, at least 0"),
        (mooncake_row(float("inf")), "timestamp: got inf; allowed: milliseconds, at least 0"),
        (mooncake_row(3), "timestamp: got 0.002 s before the row above; allowed: times in order"),
        (mooncake_row(9, hash_ids=["a"]), "hash_ids: got ['a']; allowed: a list of integers"),
        (mooncake_row(9, hash_ids=3), "hash_ids: got 3; allowed: a list of integers"),
        (
            mooncake_row(9, 513, hash_ids=[1]),
            "number of hash_ids: got 1; allowed: 2, one for every 512 tokens "
            "(kvc.hash_block_tokens)",
        ),
    ],
)
def test_malformed_mooncake_rows(path: Path, row: str, message: str) -> None:
    text = mooncake_row(0) + "\n" + mooncake_row(5) + row
    with pytest.raises(TraceError) as error:
        make(trace(path, text, format="mooncake"))
    assert str(error.value) == f"{path}:4: {message}"
    workload = make(trace(path, text, format="mooncake", on_error="skip"))
    assert workload.left_out == {"malformed": 1}


def test_malformed_lengths_rows(path: Path) -> None:
    config = lengths(path, rows=3)
    path.write_text("input_length,output_length\n12,0\n")
    with pytest.raises(TraceError, match=f":2: output_length: got 0; allowed: {COUNT}"):
        make(config)


def test_traces_of_another_block_size_are_accepted_with_it(path: Path) -> None:
    config = trace(path, mooncake_row(0, 65, hash_ids=[4, 5]), format="mooncake")
    assert make(config, hash_block_tokens=64).hash_ids == ((4, 5),)
    with pytest.raises(TraceError, match="number of hash_ids: got 2; allowed: 1"):
        make(config)


# --- unusable files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": got an empty file; allowed: at least one request"),
        (b"\r\n \n", ": got an empty file; allowed: at least one request"),
        (
            b"a,ContextTokens,GeneratedTokens\nb,1,2\n",
            ":1: TIMESTAMP: missing; allowed: a first line that names TIMESTAMP, ContextTokens, "
            "GeneratedTokens",
        ),
        (AZURE.encode() + b"\xff\n", r":6: text: got b'\xff'; allowed: UTF-8"),
        (AZURE.encode("utf-16"), r":1: text: got b'\xff'; allowed: UTF-8"),
        (gzip.compress(AZURE.encode())[:-9], ": got a broken gzip file (Compressed file ended"),
        (b"\x1f\x8b" + AZURE.encode(), ": got a broken gzip file (Unknown compression method"),
    ],
)
@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_unusable_files(path: Path, content: bytes, message: str, on_error: str) -> None:
    with pytest.raises(TraceError) as error:
        make(trace(path, content, on_error=on_error))
    assert str(error.value).startswith(f"{path}{message}")


def test_a_truncated_gzip_file_never_passes(tmp_path: Path) -> None:
    whole = gzip.compress(AZURE.encode())
    for length in range(len(whole)):
        with pytest.raises(TraceError):
            make(trace(tmp_path / f"{length}.gz", whole[:length]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
RECORD = st.fixed_dictionaries(
    {},
    optional={
        key: JSON | st.integers(0, 9) | st.lists(st.integers(), max_size=2)
        for key in ("timestamp", "input_length", "output_length", "hash_ids")
    },
)


@settings(deadline=None, max_examples=100)
@given(
    trace_format=st.sampled_from(["azure", "mooncake"]),
    rows=st.lists(RECORD.map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=20), max_size=3),
    tail=st.binary(max_size=3),
    on_error=st.sampled_from(["error", "skip"]),
)
def test_whatever_is_in_a_file_it_is_a_trace_or_a_trace_error(
    trace_format: str, rows: list[str], tail: bytes, on_error: str
) -> None:
    header = AZURE if trace_format == "azure" else mooncake_row()
    content = header.encode() + "\n".join(rows).encode("utf-8", "surrogatepass") + tail
    with tempfile.TemporaryDirectory() as directory:
        config = trace(Path(directory) / "t", content, format=trace_format, on_error=on_error)
        try:
            workload = make(config)
        except TraceError:
            return
    assert len(workload) >= 1
    assert (np.diff(workload.arrival_time) >= 0).all()


def test_a_file_named_gz_must_be_gzipped(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"broken gzip file \(Not a gzipped file"):
        make(trace(tmp_path / "trace.csv.gz", AZURE))


def test_a_missing_file_or_a_directory_says_where_the_path_comes_from(path: Path) -> None:
    config = TraceWorkload(format="azure", path=str(path))
    allowed = "allowed: the path of a trace file (the configuration's `workload.path`)"
    with pytest.raises(TraceError) as error:
        make(config)
    assert str(error.value) == f"{path}: No such file or directory; {allowed}"
    path.mkdir()
    with pytest.raises(TraceError) as error:
        make(config)
    assert str(error.value) == f"{path}: Is a directory; {allowed}"


def test_a_relative_path_is_reported_in_full(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=str(tmp_path / "absent.csv")):
        make(TraceWorkload(format="azure", path="absent.csv"))


# --- samples and recorded traces -----------------------------------------------------------------


def test_samples_are_what_the_script_makes(tmp_path: Path) -> None:
    """Compressed bytes depend on the release of zlib, so the text is compared."""
    program = [sys.executable, "scripts/make_samples.py", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(program, cwd=REPOSITORY, env=environment, check=True)
    made, kept = tmp_path / "azure_like.csv", SAMPLES / "azure_like.csv"
    assert made.read_bytes() == kept.read_bytes()
    name = "mooncake_like.jsonl.gz"
    made_text, kept_text = (
        gzip.decompress((directory / name).read_bytes()) for directory in (tmp_path, SAMPLES)
    )
    assert made_text == kept_text


@pytest.mark.parametrize(
    ("trace_format", "name", "rows"),
    [("azure", "azure_like.csv", 400), ("mooncake", "mooncake_like.jsonl.gz", 300)],
)
def test_samples_are_traces(trace_format: str, name: str, rows: int) -> None:
    config = {"format": trace_format, "path": str(SAMPLES / name), "num_requests": 1000}
    workload = make(TraceWorkload.model_validate(config))
    assert len(workload) == rows
    assert bool(workload.hash_ids) == (trace_format == "mooncake")


def recorded(name: str) -> Path:
    path = RECORDED / name
    if not path.exists():
        pytest.skip(f"the recorded trace {path} is not here")
    return path


@pytest.mark.parametrize(
    ("name", "rows", "prompt_mean", "output_mean", "seconds"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19366, 1154.70, 211.13, 3501.721937),
        ("AzureLLMInferenceTrace_code.csv", 8819, 2047.85, 27.88, 3435.948056),
    ],
)
def test_recorded_azure_traces(
    name: str, rows: int, prompt_mean: float, output_mean: float, seconds: float
) -> None:
    """Counted and averaged from the files with the csv module."""
    trace = read_trace(recorded(name), "azure")
    assert len(trace) == rows
    assert trace.prompt_tokens.mean() == pytest.approx(prompt_mean, abs=0.01)
    assert trace.output_tokens.mean() == pytest.approx(output_mean, abs=0.01)
    assert trace.time_s[-1] == pytest.approx(seconds, abs=1e-6)


def test_recorded_mooncake_trace() -> None:
    trace = read_trace(recorded("mooncake_conversation_trace.jsonl.gz"), "mooncake")
    assert len(trace) == 12031
    assert trace.prompt_tokens.mean() == pytest.approx(12035.06, abs=0.01)
    assert trace.output_tokens.mean() == pytest.approx(342.62, abs=0.01)
    assert (np.diff(trace.time_s) > 0).all()  # no two requests of a bin are left together
    assert trace.hash_ids[0] == tuple(range(14))


def test_recorded_lengths() -> None:
    trace = read_trace(recorded("shared_gpt_lengths.csv.gz"), "lengths")
    assert len(trace) == 82814
    assert trace.prompt_tokens.mean() == pytest.approx(74.12, abs=0.01)
    assert trace.output_tokens.mean() == pytest.approx(228.59, abs=0.01)


def test_parsed_traces_are_kept_and_read_only() -> None:
    path = SAMPLES / "azure_like.csv"
    trace = read_trace(path, "azure")
    assert read_trace(path, "azure") is trace
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 1
