"""The dispatch table: what it chooses, what it says about it, and what it refuses to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels_ext import dispatch
from kernels_ext.dispatch import Choice, Table, choose, choose_format, m_bucket, parse_table
from kernels_ext.tune import measure_cpu, pruned_weight, write_table


def entry(**changes: object) -> dict[str, object]:
    return {
        "isa": "avx2",
        "format": "bitmap",
        "dtype": "bfloat16",
        "N": 576,
        "K": 576,
        "sparsity": 0.5,
        "bucket": "1",
        "kernel_seconds": 1e-5,
        "dense_seconds": 3e-5,
        **changes,
    }


def table(*entries: dict[str, object], isa: str = "avx2") -> Table:
    return parse_table({"version": 1, "measurements": list(entries)}, name="test", target=isa)


def ask(t: Table, **changes: Any) -> Choice:
    layer = {
        "device": "cpu",
        "format": "bitmap",
        "dtype": torch.bfloat16,
        "N": 576,
        "K": 576,
        "sparsity": 0.5,
        "M": 1,
    }
    return choose(t, **{**layer, **changes})


@pytest.mark.parametrize(
    ("M", "bucket"),
    [
        (0, "1"),
        (1, "1"),
        (2, "2"),
        (3, "3-4"),
        (4, "3-4"),
        (5, "5-8"),
        (16, "9-16"),
        (17, "17-32"),
        (256, "129-256"),
        (257, "257+"),
        (100_000, "257+"),
    ],
)
def test_buckets_end_at_powers_of_two(M: int, bucket: str) -> None:
    assert m_bucket(M) == bucket


def test_the_faster_backend_is_chosen_and_the_figures_are_given() -> None:
    choice = ask(table(entry()))
    assert choice == Choice(
        "bitmap_avx2",
        "measured: bitmap_avx2 10 us, dense 30 us for M=1, 576x576 bfloat16 at sparsity 0.50 (table test)",
    )
    slower = ask(table(entry(kernel_seconds=4e-5)))
    assert slower.backend == "dense"
    assert "bitmap_avx2 40 us, dense 30 us" in slower.reason


def test_each_bucket_has_its_own_crossover() -> None:
    t = table(entry(), entry(bucket="17-32", kernel_seconds=9e-5, dense_seconds=5e-5))
    assert ask(t, M=1).backend == "bitmap_avx2"
    assert {ask(t, M=M) for M in (17, 20, 32)} == {ask(t, M=17)}
    assert ask(t, M=17).backend == "dense"


def test_the_nearest_shape_decides_and_then_the_nearest_sparsity() -> None:
    t = table(
        entry(N=4096, K=4096, kernel_seconds=9e-5),
        entry(N=512, K=512, kernel_seconds=1e-5),
        entry(N=512, K=512, sparsity=0.6, kernel_seconds=8e-5),
    )
    assert ask(t, N=3000, K=3000).reason.startswith("measured: bitmap_avx2 90 us")
    assert ask(t, N=600, K=600, sparsity=0.52).reason.startswith("measured: bitmap_avx2 10 us")
    assert ask(t, N=600, K=600, sparsity=0.58).reason.startswith("measured: bitmap_avx2 80 us")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"M": 2},
        {"N": 576 * 32},
        {"sparsity": 0.9},
        {"format": "dense"},
    ],
)
def test_without_a_near_measurement_the_rule_of_thumb_decides_and_says_so(changes: dict[str, Any]) -> None:
    choice = ask(table(entry(kernel_seconds=9.0)), **changes)
    assert choice.backend == f"{changes.get('format', 'bitmap')}_avx2"
    assert choice.reason.startswith("rule of thumb")
    assert "table test has nothing near" in choice.reason


def test_another_instruction_sets_measurements_are_not_used() -> None:
    assert ask(table(entry(kernel_seconds=9.0), isa="generic")).backend == "bitmap_generic"


@pytest.mark.parametrize("format", ["bitmap", "dense"])
def test_the_rule_of_thumb_ends_with_a_bucket(format: str) -> None:
    """Else a bucket's choice would depend on which M came first."""
    limit = dispatch.RULE_OF_THUMB_MAX_M[format]
    assert limit in dispatch.BUCKET_ENDS
    empty = table()
    assert ask(empty, format=format, M=limit).backend == f"{format}_avx2"
    assert ask(empty, format=format, M=limit + 1).backend == "dense"
    assert ask(empty, format=format, M=100_000).backend == "dense"


def test_a_gpu_multiplies_lane_streams_up_to_their_kernels_limit() -> None:
    limit = dispatch.RULE_OF_THUMB_MAX_M["lane_stream"]

    assert ask(table(), device="cuda", format="lane_stream", M=limit).backend == "lane_stream"
    above = ask(table(), device="cuda", format="lane_stream", M=limit + 1)
    assert above.backend == "dense"
    assert "decompress and call cuBLAS" in above.reason


def gpu_entry(**changes: object) -> dict[str, object]:
    made = entry(format="lane_stream", **changes)
    made["gpu"] = made.pop("isa")
    return {**made, "gpu": "NVIDIA H200"}


def test_a_measured_gpu_decides_by_its_times_for_either_16_bit_type() -> None:
    """The kernel and cuBLAS take as long for float16 as for bfloat16, so one is measured."""
    t = table(gpu_entry(bucket="17-32"), gpu_entry(bucket="33-64", kernel_seconds=4e-5), isa="NVIDIA H200")
    for dtype in (torch.float16, torch.bfloat16):
        asked = {"device": "cuda", "format": "lane_stream", "dtype": dtype}
        assert ask(t, M=32, **asked).backend == "lane_stream"
        slower = ask(t, M=33, **asked)
        assert slower.backend == "dense"
        assert slower.reason == (
            "measured: lane_stream 40 us, dense 30 us for M=33-64, 576x576 bfloat16 at sparsity 0.50 "
            "(table test)"
        )


def test_another_gpus_measurements_are_not_used() -> None:
    t = table(gpu_entry(kernel_seconds=9.0), isa="NVIDIA L4")
    choice = ask(t, device="cuda", format="lane_stream")
    assert choice.backend == "lane_stream"
    assert choice.reason.startswith("rule of thumb")


def test_no_table_sends_more_tokens_to_the_kernel_than_it_takes() -> None:
    t = table(gpu_entry(bucket="257+", kernel_seconds=0.0), isa="NVIDIA H200")
    assert ask(t, device="cuda", format="lane_stream", M=dispatch.MAX_CALL_TOKENS + 1).backend == "dense"


def test_what_the_own_table_lacks_is_looked_up_in_its_fallback() -> None:
    own = replace(table(entry(kernel_seconds=9.0)), name="own", fallback=table(entry(bucket="2")))
    assert ask(own, M=1).reason.endswith("(table own)")
    assert ask(own, M=2).reason.endswith("(table test)")
    assert ask(own, M=3).reason.startswith("rule of thumb")


def test_a_tuned_table_in_the_cache_directory_is_used_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "cpu_isa", lambda: "avx2")
    path = dispatch.cached_table_path("avx2")
    assert path == tmp_path / "lacunar" / "dispatch" / "avx2.json"
    write_table(path, {"version": 1, "measurements": [entry(N=64, K=64, kernel_seconds=7.0)]})

    read = dispatch.default_table.__wrapped__("cpu")

    assert ask(read, N=64, K=64).reason.startswith("measured: bitmap_avx2 7000000 us")
    assert "(table cpu_default)" in ask(read, N=4096, K=4096).reason
    assert str(path) in read.source
    path.write_text("{")
    with pytest.raises(ValueError, match="run lacunar tune again"):
        dispatch.default_table.__wrapped__("cpu")


@pytest.mark.parametrize(("format", "sparsity"), [("bitmap", 0.5), ("dense", 0.0)])
def test_tuning_measures_what_dispatch_reads(format: str, sparsity: float) -> None:
    """From M=1 on, until the kernel has lost or the time is up."""
    generator = torch.Generator().manual_seed(0)
    weight = pruned_weight(64, 64, torch.bfloat16, sparsity, generator)
    found = measure_cpu(format, weight, sparsity, seconds=0.001, cold_bytes=1)
    t = parse_table({"version": 1, "measurements": found}, name="t", target=dispatch.cpu_isa())
    assert ask(t, format=format, N=64, K=64).reason.startswith("measured")
    late = measure_cpu(format, weight, sparsity, seconds=0.001, deadline=0.0)
    assert [m["bucket"] for m in late] == ["1"]


def test_the_shipped_gpu_table_covers_busy_decoding() -> None:
    shipped = dispatch.load_table(dispatch.DEFAULT_CUDA_TABLE, "NVIDIA H200")
    for N, K in ((4096, 4096), (28672, 4096), (4096, 14336)):
        choice = ask(shipped, device="cuda", format="lane_stream", N=N, K=K, M=32)
        assert choice.reason.startswith("measured"), choice


def test_a_gpu_has_no_kernel_for_bitmaps_and_says_so() -> None:
    choice = ask(table(entry()), device="cuda")
    assert choice.backend == "dense"
    assert "no CUDA kernel multiplies by a bitmap" in choice.reason
    assert ask(table(), device="cuda", format="dense").backend == "dense"


def test_lane_streams_are_for_gpus() -> None:
    with pytest.raises(ValueError, match="lane_stream weights are for CUDA devices"):
        ask(table(), format="lane_stream")


def test_a_layer_without_elements_is_dispatched() -> None:
    assert ask(table(entry()), N=0, K=0).backend == "bitmap_avx2"


@pytest.mark.parametrize(
    ("kernel_us", "dense_us", "format"),
    [(7, 50, "dense"), (50, 7, "dense"), (9, 50, "bitmap"), (11, 50, "bitmap"), (50, 11, "bitmap")],
)
def test_a_format_is_chosen_by_the_fastest_backend_of_each(
    kernel_us: float, dense_us: float, format: str
) -> None:
    """A bitmap of 10 us is a loss against a dense-stored weight of 7 us, whatever decompressing would cost;
    against 9 us its smaller size counts."""
    dense = entry(
        format="dense", sparsity=0.0, kernel_seconds=kernel_us * 1e-6, dense_seconds=dense_us * 1e-6
    )
    choice = choose_format(table(entry(), dense), dtype=torch.bfloat16, N=576, K=576, sparsity=0.5, M=1)
    assert choice.format == format
    assert "bitmap_avx2 10 us" in choice.reason
    assert f"{min(kernel_us, dense_us):.0f} us" in choice.reason


def test_measurements_of_other_sizes_are_compared_by_the_element() -> None:
    """The nearest dense measurement may be of a larger weight than the nearest bitmap."""
    dense = entry(format="dense", sparsity=0.0, N=1152, kernel_seconds=3e-5)
    choice = choose_format(table(entry(), dense), dtype="bfloat16", N=576, K=576, sparsity=0.5, M=1)
    assert choice.format == "bitmap"
    assert "15 us for the weight stored dense" in choice.reason


def test_without_a_measurement_of_both_formats_the_bitmaps_backend_decides() -> None:
    known = {"dtype": "bfloat16", "N": 576, "K": 576, "sparsity": 0.5}
    assert choose_format(table(), M=1, **known).format == "bitmap"
    assert choose_format(table(), M=16, **known).format == "dense"
    assert choose_format(table(entry()), M=1, **known).format == "bitmap"
    assert choose_format(table(entry(kernel_seconds=4e-5)), M=1, **known).format == "dense"


def test_unknown_formats_and_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="format must be one of bitmap, dense, lane_stream, got 'csr'"):
        ask(table(), format="csr")
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        ask(table(), device="tpu")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected an object with version 1, got 'list'"),
        ({"version": 2, "measurements": []}, "version 1, got 2"),
        ({"version": 1}, "measurements must be a list, got NoneType"),
        ({"version": 1, "measurements": [3]}, r"measurements\[0\]: expected the members"),
        ({"version": 1, "measurements": [entry(), {**entry(), "speed": 1}]}, r"measurements\[1\]: expected"),
        ({"version": 1, "measurements": [entry(isa="sse")]}, "isa must be one of"),
        ({"version": 1, "measurements": [{**gpu_entry(), "gpu": ""}]}, "gpu must be a GPU's name"),
        ({"version": 1, "measurements": [{**gpu_entry(), "format": "bitmap"}]}, "format must be one of"),
        ({"version": 1, "measurements": [entry(bucket="5")]}, "bucket must be one of"),
        ({"version": 1, "measurements": [entry(N=0)]}, "N must be an integer of at least 1, got 0"),
        ({"version": 1, "measurements": [entry(N=True)]}, "N must be an integer"),
        (
            {"version": 1, "measurements": [entry(dense_seconds=float("nan"))]},
            "dense_seconds must be a finite",
        ),
        ({"version": 1, "measurements": [entry(kernel_seconds="1")]}, "kernel_seconds must be a finite"),
        ({"version": 1, "measurements": [entry(sparsity=1.5)]}, "sparsity must be at most 1"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"table test: .*{message}|table test: {message}"):
        parse_table(content, name="test", target="avx2")


def test_a_table_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"version": 1, "measurements": [entry()]}))
    assert ask(dispatch.load_table(path, "avx2")).reason.endswith("(table mine)")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"mine.json: not JSON"):
        dispatch.load_table(path)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_the_shipped_table_covers_decoding(isa: str) -> None:
    """For the shapes of small and large models, each dtype and both formats at M=1."""
    shipped = dispatch.load_table(dispatch.DEFAULT_TABLE, isa)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for N, K in ((960, 576), (576, 1536), (4096, 14336), (49152, 576)):
            for format in dispatch.MEASURED_FORMATS:
                choice = ask(shipped, dtype=dtype, N=N, K=K, format=format)
                assert choice.reason.startswith("measured"), (dtype, N, K, format, choice)


def test_the_default_table_is_the_shipped_one_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for device in ("cpu", "cuda"):
        found = dispatch.default_table.__wrapped__(device)
        assert (found.name, found.source) == (f"{device}_default", f"{device}_default (shipped)")
