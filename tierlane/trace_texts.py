"""What the settings of traces mean; `setting_texts` has all others."""

from tierlane.setting_text import Text

TRACES = {
    "traces_endpoint": Text(
        "",
        "Where to send traces by OTLP over HTTP, such as http://collector:4318; /v1/traces is added. Needs the extra "
        "`tracing`. Unset: no traces, and no cost.",
        "URL",
    ),
    "traces_sample": Text(
        "0.01", "Share of the calls that are traced, 0 to 1. All of them cost a gateway noticeable CPU.", "SHARE"
    ),
    "traces_trust_callers": Text(
        "off",
        "on: a caller's valid traceparent decides whether its call is traced. For callers of your own: anybody could have "
        "everything traced.",
    ),
}
