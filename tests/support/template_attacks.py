"""Chat templates that take much time or memory, or reach for what the sandbox hides.

Each is (kind, source). The message's content is 50,000 characters long.
"""

from __future__ import annotations

BIG = "messages[0].content"

FILTERS = [
    "{{ 'x' | center(3000000000) }}",
    "{{ ('%3000000000s' | format('x')) }}",
    "{{ 'x' | indent(1000000000) }}",
    "{{ ('a\\n' * 1000000) | indent(100000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ [1] | batch(1000000000, 'x') | list }}",
    "{{ messages | slice(1000000000) | list }}",
    "{{ (messages | length + 0.5) | round(2000000000, 'ceil') }}",
    "{{ 42.5 | round(30000000, 'ceil') }}",
    "{{ (range(90000) | join('x' * 100000)) }}",
    "{{ ('x' * 1000000) | replace('', 'y' * 1000000) }}",
    "{{ ('x ' * 10000000) | wordwrap(1) }}",
    "{{ ('<' * 100000000) | escape | length }}",
    "{{ ('x' * 100000000) | list | length }}",
    "{{ ('x' * 50000000) | reverse | list | length }}",
    "{{ ('x ' * 50000000) | title | length }}",
    "{{ ('é' * 100000000) | urlencode | length }}",
    "{{ ('http://a.b ' * 1000000) | urlize | length }}",
    "{{ ('<a>' * 30000000) | striptags | length }}",
    "{{ range(100000) | map('string') | map('center', 100000) | list | length }}",
    "{{ (range(100000) | list * 100) | sort | length }}",
    "{{ (range(100000) | list * 100) | unique | list | length }}",
    "{{ (range(100000) | list * 100) | groupby('real') | list | length }}",
    "{{ ('x' * 100000000) | pprint | length }}",
    "{{ ('x' * 100000000) | wordcount }}",
    "{{ ([[1] * 100000] * 10000) | sum(start=[]) | length }}",
]
METHODS = [
    "{{ 'x'.ljust(3000000000) }}",
    "{{ 'x'.zfill(3000000000) }}",
    "{{ 'x'.center(3000000000) }}",
    "{{ ('\\t' * 1000).expandtabs(10000000) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "{{ ('a' * 1000000).join(range(90000) | map('string') | list) }}",
    f"{{% for a in range(90000) %}}{{{{ {BIG}.count('x' * 25000 ~ 'y') }}}}{{% endfor %}}",
    "{{ ('a,' * 100000000).split(',') | length }}",
    "{{ ('a\\n' * 100000000).splitlines() | length }}",
    "{{ '{:3000000000}'.format('x') }}",
    "{{ '{:>{n}}'.format('x', n=3000000000) }}",
    "{{ ('x' * 100000000).encode() }}",
    "{{ ('ß' * 100000000).upper() | length }}",
    "{{ ('x' * 100000000).partition('y') | length }}",
    "{{ ('{}' * 10000000).format(*(['y'] * 10000000)) | length }}",
    "{{ (0).to_bytes(3000000000, 'big') }}",
    "{{ (10).__pow__(1000000000) }}",
]
OPERATORS = [
    "{% set ns = namespace(a='x' * 99999) %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}"
    "{% endfor %}{{ ns.a | length }}",
    "{% set ns = namespace(a='x' * 99999) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}"
    "{% endfor %}{{ ns.a | length }}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}"
    "{% endfor %}{{ ns.a | length }}",
    "{{ '%3000000000s' % 'x' }}",
    "{{ '%.3000000000f' % 1.5 }}",
    "{{ 'a' * 3000000000 }}",
    "{{ 3000000000 * [1] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ (9 ** 999999) // (7 ** 99999) }}",
    "{{ (7 ** 99999999) % 10 }}",
    "{% set ns = namespace(n=3) %}{% for c in 'x' * 99 %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    f"{{% set s = {BIG} %}}" + "{% set s = s ~ s %}" * 24 + "{{ s | length }}",
    f"{{% set s = {BIG} %}}" + "{% set s = s + s %}" * 24 + "{{ s | length }}",
    "{{ ('x' * 100000000)[::-1] | length }}",
    "{{ (range(100000) | list * 1000)[::2] | length }}",
    "{{ 10 ** 5000 }}",
]
FOLDING = [
    "{{ 'x' * 1000000000 ~ 'y' }}",
    "{% if 9 ** (9 ** 8) %}{% endif %}",
    "{{ [1] * 100000000 }}",
    "{{ ('a' * 100000000) | upper }}",
    "{{ 'ab' | center(1000000000) | length }}",
    "{{ 2 ** 99999999 }}",
]
LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{% endcall %}{% call m(n - 1) %}{% endcall %}"
    "{% endif %}{% endmacro %}{{ m(40) }}",
    "{% for a in 'xx' * 9999 recursive %}{{ loop('xx' * 9999) }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% block a %}{% set ns.n = ns.n + 1 %}{% if ns.n % 40 %}"
    "{{ self.a() }}{{ self.a() }}{% endif %}{% set ns.n = ns.n - 1 %}{% endblock %}",
    f"{{% for a in 'x' * 999999 if not {BIG}.count('y') > 9 and 0 %}}{{% endfor %}}",
    "{% for i in range(90000) %}{% for m in messages %}{{ m | tojson | length }}{% endfor %}"
    "{% endfor %}",
    "{% set c = cycler(*(range(90000) | list)) %}{% for i in range(90000) %}"
    "{% for j in range(90000) %}{% set x = c.next() %}{% endfor %}{% endfor %}",
]
NESTING = [
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "+".join(["1"] * 50000) + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ " + "-" * 10000 + "1 }}",
    "{{ " + "not " * 10000 + "1 }}",
    "{{ " + "9" * 10000 + " }}",
    "{{ x" + ".a" * 10000 + " }}",
    "{{ x" + "|upper" * 10000 + " }}",
]
IMPORTS = [
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ self._TemplateReference__context.environment }}",
]
ATTRIBUTES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "{% set ns = namespace(__call__='{0.__class__}'.format) %}{{ ns(1) }}",
    "{{ (messages | map('string')).gi_frame.f_globals }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ range.__closure__[0].cell_contents }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].clear() }}",
    "{{ '\\ud800' }}",
]
KINDS = {
    "filter": FILTERS,
    "method": METHODS,
    "operator": OPERATORS,
    "folding": FOLDING,
    "loop": LOOPS,
    "nesting": NESTING,
    "import": IMPORTS,
    "attribute": ATTRIBUTES,
}
ATTACKS = [(kind, source) for kind, sources in KINDS.items() for source in sources]
