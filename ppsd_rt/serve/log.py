"""One JSON object for each line of the log, through the logger "ppsd_rt.serve"."""

import json
import logging
from datetime import UTC, datetime

_LOG = logging.getLogger("ppsd_rt.serve")


def log(event: str, **fields: object) -> None:
    """Fields that are None are left out."""
    said = {key: value for key, value in fields.items() if value is not None}
    _LOG.info("%s", json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **said}))
