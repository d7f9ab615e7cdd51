"""Dashboards and alert rules, generated from the metric catalogue so that they cannot drift from what is exposed."""
