"""Formats of JSON Schema as patterns: by RFC 3339, 5321, 1123, 4122, 3986, 6901, in the part that all readers take."""

_IPV4 = r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,2}}"  # of 253 characters at most
_DAY_OF_MONTH = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DAY = f"[0-9]{{3}}[1-9]-{_DAY_OF_MONTH}"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join([
    f"({_HEX}:){{7}}{_HEX}",
    *(f"({_HEX}:){{{n}}}(:{_HEX}){{1,{7 - n}}}" for n in range(1, 7)),
    f":(:{_HEX}){{1,7}}",
    "::",
])  # fmt: skip
_SEGMENT = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_QUERY = rf"(\?({_SEGMENT}|[/?])*)?(#({_SEGMENT}|[/?])*)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//{_HOST}(:[0-9]{{1,4}})?(/{_SEGMENT}*)*|/?{_SEGMENT}+(/{_SEGMENT}*)*){_QUERY}"
_DATE_PART = "([0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}D)"
_TIME_PART = "T([0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}S)"
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-VERSION[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
_EMAIL = rf"[a-zA-Z0-9_+-]{{1,20}}(\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,2}}"
# Of the formats for other alphabets, what they have in common with ASCII's.
FORMATS = {
    "date-time": f"{_DAY}T{_CLOCK}{_ZONE}", "date": _DAY, "time": _CLOCK + _ZONE,
    "duration": f"P({_DATE_PART}({_TIME_PART})?|{_TIME_PART}|[0-9]{{1,6}}W)",
    "email": _EMAIL, "idn-email": _EMAIL, "hostname": _HOST, "idn-hostname": _HOST,
    "ipv4": _IPV4, "ipv6": _IPV6, "uuid": _UUID.replace("VERSION", "[1-5]"),
    **{f"uuid{n}": _UUID.replace("VERSION", str(n)) for n in range(1, 9)},
    "uri": _URI, "iri": _URI, "uri-template": _URI,
    "uri-reference": rf"{_URI}|(/{_SEGMENT}*)*{_QUERY}", "iri-reference": rf"{_URI}|(/{_SEGMENT}*)*{_QUERY}",
    "json-pointer": "(/([^/~]|~[01])*)*", "relative-json-pointer": "(0|[1-9][0-9]{0,8})(#|(/([^/~]|~[01])*)*)",
    "byte": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}  # fmt: skip
# OpenAPI's and pydantic's names that leave a text as free as it was.
FREE_FORMATS = {"binary", "password", "float", "double", "path", "file-path", "directory-path"}
WHOLE_FORMATS = {"int32": 2**31, "int64": 2**63}
