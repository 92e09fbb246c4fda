"""The verbs about models: options, without logic."""

# ruff: noqa: PLC0415 (what a verb needs is imported when it runs, so that help is quick)
from typing import Annotated

import typer

from gdn2.cli.base import Backend, Device, Dtype, JsonFile, app, console, write


@app.command()
def show(
    preset: Annotated[
        str | None, typer.Argument(help="Which preset; without one, all their names.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what a model is made of and what it costs: parameters, FLOPs, state."""
    from gdn2.models.presets import preset as find
    from gdn2.models.presets import preset_names
    from gdn2.models.summary import render, summarise

    if preset is None:
        typer.echo("\n".join(preset_names()))
        return write(json_file, {"presets": [*preset_names()]})
    summary = summarise(find(preset))
    render(preset, summary, console())
    return write(json_file, summary.as_json())


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="A model's folder; or a preset, with random weights.")
    ],
    text: Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, or a tokenizer.json; by default the model's, of a preset bytes."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="End after so many tokens.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(help="End where the text would contain this. Repeatable.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the likeliest, to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only those this likely, of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="More than 1 makes tokens unlikely that were there before.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same tokens.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = "auto",
    json_file: JsonFile = None,
) -> None:
    """Continue a text; it is printed as it comes, the speed afterwards, on standard error."""
    from gdn2.cli.talk import Talk
    from gdn2.models.generate import Stop
    from gdn2.models.sampling import Sampling
    from gdn2.ops.backends import using

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    ending = Stop(max_tokens=max_tokens, strings=tuple(stop or ()))
    talk = Talk(model, tokenizer, device, dtype)
    try:
        prompt = typer.get_text_stream("stdin").read() if text == "-" else text
    except UnicodeDecodeError as wrong:
        raise ValueError(f"standard input: got {wrong}, expected UTF-8") from None
    with using(backend):
        report = talk.go_on(prompt, sampling, ending, seed)
    typer.echo(report.in_words(), err=True)
    write(json_file, report.as_json())
