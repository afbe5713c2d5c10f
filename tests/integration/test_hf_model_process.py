"""`hf:DIR` in its own process: a text that takes too long is ended, and the process lives."""

from pathlib import Path

from gpu_pool.model_process.handle import ModelLaunch, ModelProcess, run_watched
from hf_models import change_config, make_causal
from scheduler.payload import Payload, encode_payload

LONG_CONTEXT = 100_000
NO_TOKEN = 99_999


def stored(text: str, max_tokens: int) -> bytes:
    return encode_payload(Payload("m", text, {"max_tokens": max_tokens}))


async def test_a_text_that_takes_too_long_costs_no_process(tmp_path: Path) -> None:
    """It ends with `gpu_timeout` before the watchdog would kill the model; who asked for less has an answer, before and after."""
    folder = make_causal(tmp_path / "endless")
    change_config(folder, max_position_embeddings=LONG_CONTEXT, eos_token_id=NO_TOKEN)
    change_config(folder, "generation_config.json", eos_token_id=NO_TOKEN)
    change_config(folder, "tokenizer_config.json", eos_token=None)
    model = await ModelProcess.spawn(ModelLaunch(f"hf:{folder}", "cpu", dtype="float32"))
    try:
        await model.ready()
        bodies = [stored("Once", 4096), stored("Once", 3)]
        done = await run_watched(model, bodies, cap_ms=3000, timeout_ms=3000, budget_ms=3000, left_ms=[700, 3000])
        after = await model.run([stored("Once", 3)], 5000)
    finally:
        await model.close()

    assert [result.error_code for result in done.results] == ["gpu_timeout", ""]
    assert after.results == done.results[1:]
