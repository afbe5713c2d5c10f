"""What the settings of metrics and of log lines for requests mean; `setting_texts` has all others."""

from tierlane.setting_text import Text

METRICS = {
    "metrics_dir": Text(
        "",
        "Directory where the gateways of one host keep their counters, so that /metrics of each is the sum of all. Unset: "
        "metrics in the data directory.",
    ),
    "request_log": Text(
        "off", "on: one log line for each call of a customer, without input, output or key. Costs some CPU a request."
    ),
}
