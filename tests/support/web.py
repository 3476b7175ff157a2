"""Single requests over plain HTTP.

The functions of httpx2 with these names read the certificate store for each request, which takes
longer than the request.
"""

from __future__ import annotations

from functools import partial

import httpx2

get = partial(httpx2.get, verify=False)
post = partial(httpx2.post, verify=False)
stream = partial(httpx2.stream, verify=False)
