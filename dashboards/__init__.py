"""Dashboards and alert rules, generated from the metric catalogue so that they cannot drift from what is exposed."""

import warnings

# At import the SDK asks for a newer dashboard format; version 1 is meant, since old and new Grafanas take it.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Prefer using dashboardv2", category=DeprecationWarning)
    import grafana_foundation_sdk.builders.dashboard
    import grafana_foundation_sdk.builders.heatmap  # noqa: F401
