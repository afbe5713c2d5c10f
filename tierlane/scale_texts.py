"""What the settings of autoscaling mean; a section of `setting_texts`, like it free of imports that take long."""

from tierlane.setting_text import Text, number

AUTOSCALE = {
    "autoscale": Text(
        "",
        "Least and most workers that /internal/autoscale advises for a pool. With it `tierlane up` "
        "adds and drains workers of its own pool by that advice. Unset: 1:256, and only advice.",
        "MIN:MAX",
    ),
    "autoscale_wait_ms": number(
        "500", "Milliseconds within which what waits should be gone. Shorter asks for more workers for the same queue."
    ),
    "autoscale_need_ms": number(
        "10000",
        "Milliseconds that demand or backlog must need more workers before they are advised. Shorter follows bursts, too.",
    ),
    "autoscale_deep_ms": number(
        "30000", "Milliseconds with 500 or more waiting after which 3 more workers are advised."
    ),
    "autoscale_long_ms": number("60000", "Milliseconds with 100 or more waiting after which 1 more worker is advised."),
    "autoscale_busy_ms": number(
        "300000", "Milliseconds with over 85 % of the workers used after which 1 more is advised."
    ),
    "autoscale_calm_ms": number(
        "900000",
        "Milliseconds with under 40 % of the workers used after which fewer are advised. Shorter saves workers, and lacks "
        "them when the load comes back.",
    ),
    "autoscale_cooldown_ms": number(
        "60000", "Milliseconds between two steps. It should be longer than a worker takes to load its model."
    ),
}
