"""What /metrics says of a real GPU under a prefill load and under a decode load.

    python tests/deploy/gpu_metrics.py MODEL --out DIR [--make-llama HIDDEN LAYERS] [--seconds 8]

Starts a server on the GPU, keeps it busy with long prompts that ask for one token, lets it rest, keeps it
busy with streams, and writes the page at the end of each part (prefill.txt, decode.txt) and a table by phase.
Fails when clocks, power or energy are missing or a phase has no energy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bench_serve import make_llama, start_server

Samples = dict[tuple[str, str], float]


def read(page: str) -> Samples:
    """(name, phase) -> value of the samples of the first GPU."""
    return {
        (sample.name, sample.labels.get("phase", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def load(http: httpx.AsyncClient, seconds: float, concurrency: int, prompt: int, new: int) -> None:
    """Keep `concurrency` requests open for about `seconds`."""
    end = time.monotonic() + seconds

    async def one(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            body = {
                "prompt": [draw.randrange(3, 200) for _ in range(prompt)],
                "max_tokens": new,
                "temperature": 0,
                "ignore_eos": True,
            }
            (await http.post("/v1/completions", json=body)).raise_for_status()

    await asyncio.gather(*(one(seed) for seed in range(concurrency)))


def table(before: Samples, after: Samples, part: str) -> list[dict[str, float | str]]:
    """Prints and returns what each phase took between two pages."""
    rows: list[dict[str, float | str]] = []

    def gain(name: str, phase: str) -> float:
        return after.get((name, phase), 0.0) - before.get((name, phase), 0.0)

    for phase in ("prefill", "decode", "mixed", "idle"):
        seconds = gain("lacunar_gpu_phase_seconds_total", phase)
        joules = gain("lacunar_gpu_phase_energy_joules_total", phase)
        if seconds < 0.05:
            continue
        tokens = gain("lacunar_step_tokens_sum", phase) if phase != "idle" else 0.0
        ratio = gain("lacunar_gpu_phase_full_clock_seconds_total", phase) / seconds
        rows.append(
            {
                "part": part,
                "phase": phase,
                "seconds": round(seconds, 2),
                "joules": round(joules, 1),
                "watts": round(joules / seconds, 1),
                "clock_ratio": round(ratio, 3),
                "tokens_per_joule": round(tokens / joules, 2) if joules else 0.0,
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


async def measure(options: argparse.Namespace, url: str) -> None:
    """Run the parts and write what came of them."""
    rows: list[dict[str, float | str]] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await load(http, 0, 1, 8, 4)

        async def page() -> str:
            await asyncio.sleep(3.5)  # attribution comes two seconds late, energy each second
            return (await http.get("/metrics")).text

        parts = {"idle": None, "prefill": (8, 2000, 1), "decode": (options.streams, 16, 512)}
        for part, shape in parts.items():
            before = read(await page())
            if shape is None:
                await asyncio.sleep(2)
            else:
                work = asyncio.create_task(load(http, options.seconds, *shape))
                await asyncio.sleep(options.seconds * 0.8)
                text = (await http.get("/metrics")).text
                (options.out / f"{part}.txt").write_text(text)
                now = read(text)
                for name in ("sm_clock_hertz", "memory_clock_hertz", "power_watts", "power_limit_watts"):
                    print(part, name, now["lacunar_gpu_" + name, ""], flush=True)
                await work
            rows += table(before, read(await page()), part)
        final = (await http.get("/metrics")).text
    (options.out / "after.txt").write_text(final)
    last = read(final)
    samples = last["lacunar_gpu_sampler_duration_seconds_count", ""]
    facts = {
        "rows": rows,
        "sampler_samples": samples,
        "sampler_mean_seconds": last["lacunar_gpu_sampler_duration_seconds_sum", ""] / samples,
        "sampler_cpu_seconds": last["lacunar_gpu_sampler_cpu_seconds_total", ""],
        "sampler_cpu_share": last["lacunar_gpu_sampler_cpu_seconds_total", ""] / (samples * 0.1),
        "sampler_errors": last["lacunar_gpu_sampler_errors_total", ""],
    }
    (options.out / "phases.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({key: value for key, value in facts.items() if key != "rows"}))
    by_phase = {(row["part"], row["phase"]): row for row in rows}
    assert by_phase["prefill", "prefill"]["joules"], "no energy was attributed to prefill"
    assert by_phase["decode", "decode"]["joules"], "no energy was attributed to decode"


def main() -> None:
    """Start, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--make-llama", type=int, nargs=2, metavar=("HIDDEN", "LAYERS"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.concurrency = [max(16, options.streams)]
    if options.make_llama:
        make_llama(options.model, *options.make_llama, sparsity=0.5)
    server, url = start_server(options)
    try:
        asyncio.run(measure(options, url))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
