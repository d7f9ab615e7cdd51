"""A query of Grafana's Infinity datasource, for which the SDK has no builder.

Infinity fetches a URL and reads JSON. The path is relative: host and credentials belong to the datasource, so a
dashboard can be imported anywhere.
"""

from typing import Any, Self

from grafana_foundation_sdk.cog import builder, variants
from grafana_foundation_sdk.models.common import DataSourceRef

PLUGIN = "yesoreyeram-infinity-datasource"


class InfinityQuery(variants.Dataquery):
    """What the plugin stores for a query, camel and snake case mixed as the plugin has them."""

    def __init__(
        self, path: str, params: dict[str, str], datasource: DataSourceRef, columns: dict[str, str] | None = None
    ) -> None:
        self.ref_id: str | None = None  # set when the dashboard numbers its targets
        self.datasource = datasource
        self.path = path
        self.params = params
        self.columns = columns or {}  # name → type; empty: every column that the answer has

    def to_json(self) -> dict[str, object]:
        return {
            "refId": self.ref_id,
            "datasource": self.datasource,
            "type": "json",
            "source": "url",
            "parser": "backend",
            "format": "table",
            "root_selector": "",
            "columns": [{"selector": name, "text": name, "type": kind} for name, kind in self.columns.items()],
            "filters": [],
            "url": self.path,
            "url_options": {
                "method": "GET",
                "data": "",
                "params": [{"key": key, "value": value} for key, value in self.params.items()],
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        params = {param["key"]: param["value"] for param in data["url_options"]["params"]}
        columns = {column["selector"]: column["type"] for column in data["columns"]}
        query = cls(data["url"], params, DataSourceRef.from_json(data["datasource"]), columns)
        query.ref_id = data.get("refId")
        return query


class Infinity(builder.Builder[InfinityQuery]):
    """One named question at the control plane, over the dashboard's time range and at its observer."""

    def __init__(
        self,
        question: str,
        datasource: DataSourceRef,
        params: dict[str, str] | None = None,
        columns: dict[str, str] | None = None,
    ) -> None:
        # Grafana replaces the first two by milliseconds since the epoch.
        window = {"from": "${__from}", "to": "${__to}", "observer": "${observer}"}
        self._query = InfinityQuery(f"/api/q/{question}", window | (params or {}), datasource, columns)

    def build(self) -> InfinityQuery:
        return self._query
