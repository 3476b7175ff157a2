"""The texts of the formats of JSON Schema, as regular expressions without anchors.

They are of RFC 3339 (dates and durations), 4122 (UUIDs), 4291 (IPv6), 5321 (email), 1123 (host
names) and 3986 (URIs), and narrower where readers are: no year 0, no second 60, no quoted mailbox.
"""

from __future__ import annotations

MONTH_DAY = (
    "(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
)
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP = "(?:0[48]|[2468][048]|[13579][26])"  # two digits that four divides, but not 00
DATE = f"(?:{YEAR}-(?:{MONTH_DAY})|(?:[0-9]{{2}}{LEAP}|{LEAP}00)-02-29)"
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{CLOCK})"

COUNT = "[0-9]{1,6}"
DAYS = f"(?:{COUNT}Y(?:{COUNT}M(?:{COUNT}D)?)?|{COUNT}M(?:{COUNT}D)?|{COUNT}D)"
HOURS = f"T(?:{COUNT}H(?:{COUNT}M(?:{COUNT}S)?)?|{COUNT}M(?:{COUNT}S)?|{COUNT}S)"

LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ATOM = "[A-Za-z0-9_+-]{1,32}"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
HEX = "[0-9A-Fa-f]"
GROUP = f"{HEX}{{1,4}}"
# With `::`, n groups stand before it and at most 7 - n after it.
SHORTENED = "|".join(
    f"(?:{GROUP}:){{{before}}}(?::{GROUP}){{1,{7 - before}}}" for before in range(1, 7)
)
IPV6 = f"(?:(?:{GROUP}:){{7}}{GROUP}|{SHORTENED}|(?:{GROUP}:){{1,7}}:|:(?::{GROUP}){{1,7}}|::)"
URI_CHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"

FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DAYS}(?:{HOURS})?|{HOURS}|{COUNT}W)",
    "email": rf"{ATOM}(?:\.{ATOM})?@{LABEL}(?:\.{LABEL}){{1,3}}",
    "hostname": rf"{LABEL}(?:\.{LABEL}){{0,3}}",
    "ipv4": rf"{OCTET}(?:\.{OCTET}){{3}}",
    "ipv6": IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(?:{URI_CHAR}|/)+(?:\?(?:{URI_CHAR}|[/?])*)?"
    f"(?:#(?:{URI_CHAR}|[/?])*)?",
    "uuid": f"{HEX}{{8}}-(?:{HEX}{{4}}-){{3}}{HEX}{{12}}",
}
# llguidance 1.9 allows 29 February in every year, the year 0 and the second 60.
STRICTER = ("date", "time", "date-time")
