"""The banner of `tierlane up`, with a curl command for each tier."""

from collections.abc import Mapping, Sequence

EXAMPLE_INPUT = "Once upon a time"


def banner(
    http_url: str, keys: Mapping[str, str], models: Sequence[str], data_dir: str, others: Mapping[str, str] = {}
) -> str:
    """The text of the banner; it contains the demo keys, which are valid only on this machine.

    `others`: further lines, by their heading.
    """
    served = f"model{'s' if len(models) > 1 else ''} {', '.join(models)}"
    parts = [f"\nTierlane is ready: {http_url}, {served}. Try it as each of the demo customers:\n"]
    body = f"-H 'Content-Type: application/json' -d '{{\"input\": \"{EXAMPLE_INPUT}\"}}'"
    parts += [
        f"\n# {tier}\ncurl -s {http_url}/v1/inference -H 'Authorization: Bearer {key}' {body}\n"
        for tier, key in keys.items()
    ]
    parts.append(
        "".join(f"\n{name:<8}{text}" for name, text in others.items()) + f"\nDocs    {http_url}/docs"
        f"\nPage    {http_url}/internal/dashboard (log in with the token in {data_dir}/service-token)"
        f"\nHealth  curl -s -H \"Authorization: Bearer $(cat '{data_dir}/service-token')\" {http_url}/internal/health"
        f"\nState   {data_dir}/stack.json"
        "\nStop    Ctrl-C\n\n"
    )
    return "".join(parts)
