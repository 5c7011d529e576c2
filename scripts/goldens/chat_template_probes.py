"""Small templates that show how Python prints values, and what its filters, tests, methods and operators do."""

CONTEXT = {
    "s": "Hello, World",
    "u": "Ünïcode ß ﬀ",
    "blank": "  a b \t c\n",
    "lines": "a\nb\r\nc\n\nd",
    "n": 7,
    "big": 12345678901234567,
    "f": 0.1,
    "yes": True,
    "none": None,
    "words": ["b", "a", "C"],
    "numbers": [3, 1, 2],
    "mixed": [1, 2.0, "x'y", "q\"", None, True, {"k": [1e20, 1e-7, 1e16, 123456789.0, -0.0, 1.5e300]}],
    "d": {"z": 1, "a": {"y": [1, 2], "é": "<&>'\""}, "m": None},
    "people": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 25}, {"name": "Cy", "age": 30, "ok": True}],
    "empty": [],
}

PROBES = [
    # Printing
    "{{ mixed }}", "{{ d }}", "{{ none }}|{{ yes }}|{{ f }}|{{ big }}", "{{ (1, 'a') }}{{ (1,) }}{{ [] }}{{ {} }}",
    "{{ 1e20 }} {{ 1e-7 }} {{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 1.0 }} {{ -0.0 }}", "{{ ['\\n', '\\t', '\\\\', '\\u00a0', '\\u200b', 'é', '\\u0301'] }}",
    "{{ s ~ none ~ yes ~ 1.5 ~ [1, 'a'] }}", "{{ d | string }}", "{{ 1.0 | string }}{{ none | string }}", "{{ undefined_name }}|", "{{ 'a' ~ undefined_name }}|",
    "{{ mixed | join(', ') }}", "{{ [1.0, 1e20] | join(';') }}", "{{ d.items() | list }}", "{{ d.keys() | list }}", "{{ d.values() | list }}",
    "{{ 'x' * 3 }}{{ [1] * 2 }}", "{{ [1] + [2, 'b'] }}", "{{ true }}{{ True }}{{ None }}{{ none }}",
    # JSON
    "{{ d | tojson }}", "{{ mixed | tojson }}", "{{ d | tojson(indent=2) }}", "{{ d | tojson(indent=4, sort_keys=True) }}", "{{ d | tojson(ensure_ascii=True) }}",
    "{{ d | tojson(separators=(',', ':')) }}", "{{ d | tojson(indent=none) }}", "{{ [] | tojson }}{{ {} | tojson(indent=2) }}", "{{ [[], {}] | tojson(indent=1) }}",
    "{{ u | tojson(ensure_ascii=True) }}", "{{ '\\u007f\\u2028👍' | tojson }}", "{{ '👍\\u007f' | tojson(ensure_ascii=True) }}", "{{ undefined_name | tojson }}", "{{ d | tojson(indent=0) }}",
    "{{ d | tojson(indent='\\t') }}", "{{ (1, 2) | tojson }}", "{{ {1: 2, none: 3} | tojson }}", "{{ 'a' | tojson | upper }}",
    # Operators
    "{{ 7 % -3 }} {{ -7 % 3 }} {{ -7 // 2 }} {{ 7 // -2 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }}", "{{ 7.5 % -2 }} {{ 6 / 3 }}", "{{ '%s and %s' % (s, 1.5) }}", "{{ '%s' % d }}",
    "{{ '%d|%5.2f|%-5s|%05d|%x' % (7, 3.14159, 'ab', 42, 255) }}", "{{ '%s' % none }}", "{{ '%s%%' % 5 }}", "{{ 'a' < 'b' }}{{ 1 == 1.0 }}{{ [1] == [1] }}{{ (1,) == [1] }}", "{{ 1 in [1, 2] }}{{ 'z' in d }}{{ 'ell' in s }}{{ 3 not in [1] }}",
    "{{ 1 < 2 < 3 }}", "{{ not empty }}{{ empty or 'e' }}{{ s and 1 }}", "{{ s[0] }}{{ s[-1] }}{{ s[1:4] }}{{ s[::-1] }}{{ numbers[1:] }}{{ numbers[-2:] }}", "{{ 'a' + 1 }}", "{{ 'a' + none }}", "{{ 'a' + undefined_name }}",
    "{{ undefined_name.x }}", "{{ d.nope }}|{{ d.nope is defined }}", "{{ d['a']['y'][1] }}{{ d.a.y[0] }}", "{{ none.x }}|", "{{ numbers[10] }}|", "{{ 'b' if yes else 'c' }}{{ 'b' if not yes }}|", "{{ 5 is divisibleby 5 }}",
    "{{ 10 // 3 }}{{ 10.0 // 3 }}", "{{ -2 ** 2 }}", "{{ true + 1 }}",
    # String methods
    "{{ s.upper() }}{{ s.lower() }}{{ s.title() }}{{ s.capitalize() }}{{ s.swapcase() }}{{ u.casefold() }}", "{{ '7'.zfill(3) }}{{ '-7'.zfill(4) }}", "[{{ s.center(20) }}|{{ s.center(17, '*') }}|{{ 'ab'.ljust(5, '.') }}|{{ 'ab'.rjust(5) }}]",
    "{{ 'a b  c'.split() }}{{ 'a,b,c'.split(',') }}{{ 'a,b,c'.split(',', 1) }}{{ ' a  b '.split(' ') }}{{ ''.split() }}{{ ''.split(',') }}", "{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a b c'.rsplit(none, 1) }}{{ ' a b '.rsplit() }}", "{{ 'a,b,c'.split(',', maxsplit=1) }}{{ 'a b c'.split(maxsplit=1) }}{{ 'a-b'.split(sep='-') }}",
    "{{ blank.split() }}{{ blank.split(none, 1) }}", "{{ 'k=v=w'.partition('=') }}{{ 'k=v=w'.rpartition('=') }}{{ 'k'.partition('=') }}{{ 'k'.rpartition('=') }}", "{{ 'prefix-x'.removeprefix('prefix-') }}{{ 'x.py'.removesuffix('.py') }}{{ 'x'.removeprefix('y') }}",
    "{{ s.index('W') }}{{ s.find('W') }}{{ s.find('q') }}{{ s.rfind('o') }}{{ s.rindex('o') }}{{ s.find('o', 5) }}", "{{ s.index('q') }}", "{{ s.count('l') }}{{ s.count('l', 4) }}", "{{ s.startswith('He') }}{{ s.startswith(('x', 'H')) }}{{ s.endswith('ld') }}{{ s.startswith('W', 7) }}",
    "[{{ blank.strip() }}|{{ blank.lstrip() }}|{{ blank.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abc'.lstrip('ab') }}|{{ 'abc'.rstrip('bc') }}]", "{{ lines.splitlines() }}{{ lines.splitlines(true) }}", "{{ s.replace('l', 'L') }}{{ s.replace('l', 'L', 1) }}", "{{ ', '.join(words) }}{{ ''.join(['a', 'b']) }}",
    "{{ ', '.join([1]) }}", "{{ '{} {1}'.format(1, 2) }}", "{{ '{} {}'.format(1, 'x') }}{{ '{0}{1}{0}'.format('a', 'b') }}{{ '{x}'.format(x=3) }}{{ '{:>5}|{:.2f}'.format('a', 1.239) }}", "{{ '12'.isdigit() }}{{ 'a1'.isalnum() }}{{ 'ab'.isalpha() }}{{ ' '.isspace() }}{{ 'A'.isupper() }}{{ 'a'.islower() }}{{ '12'.isnumeric() }}{{ '1'.isdecimal() }}{{ 'Ab'.istitle() }}",
    "{{ s.encode('utf-8') | length }}", "{{ 'a\\tb'.expandtabs(4) }}", "{{ s.nope() }}", "{{ 'ab'.__class__ }}|", "{{ '\\x1f a'.strip() }}|",
    # Lists and dictionaries
    "{{ numbers.index(1) }}{{ numbers.count(3) }}{{ numbers.copy() }}", "{{ numbers.append(4) }}", "{{ d.get('z') }}{{ d.get('q') }}{{ d.get('q', 5) }}", "{{ d.copy() }}", "{{ d.pop('z') }}", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}", "{% for k, v in d | items %}{{ k }}{% endfor %}",
    "{% for k, v in d | dictsort %}{{ k }}{% endfor %}", "{% for k, v in {'b': 1, 'A': 2} | dictsort(reverse=true) %}{{ k }}{% endfor %}", "{% for k, v in {'b': 1, 'A': 2} | dictsort(by='value') %}{{ k }}{% endfor %}", "{{ dict(a=1, b='x') }}", "{{ dict(a=1).items() | list }}", "{{ range(3) | list }}{{ range(1, 10, 3) | list }}{{ range(3, 0, -1) | list }}",
    # Filters
    "{{ words | sort }}{{ words | sort(case_sensitive=true) }}{{ numbers | sort(reverse=true) }}", "{{ people | sort(attribute='age') | map(attribute='name') | list }}", "{{ people | selectattr('age', 'equalto', 30) | map(attribute='name') | join(',') }}", "{{ people | selectattr('ok', 'defined') | list | length }}{{ people | rejectattr('ok', 'defined') | list | length }}",
    "{{ people | selectattr('tags') | list | length }}", "{{ numbers | select('odd') | list }}{{ numbers | reject('odd') | list }}", "{{ numbers | select('>', 1) | list }}", "{{ people | map(attribute='ok', default='-') | list }}", "{{ words | map('upper') | list }}", "{{ people | groupby('age') | map(attribute='grouper') | list }}", "{% for age, group in people | groupby('age') %}{{ age }}:{{ group | length }};{% endfor %}",
    "{{ numbers | sum }}{{ people | sum(attribute='age') }}", "{{ numbers | max }}{{ numbers | min }}", "{{ numbers | first }}{{ numbers | last }}{{ empty | first }}|", "{{ numbers | length }}{{ s | length }}{{ d | count }}", "{{ undefined_name | length }}", "{{ undefined_name | default('x') }}{{ none | default('x') }}{{ none | default('x', true) }}{{ '' | d('y', true) }}",
    "{{ s | upper }}{{ s | lower }}{{ 'hello world' | title }}{{ 'hello World' | capitalize }}", "[{{ blank | trim }}]", "[{{ 'xxaxx' | trim('x') }}]", "{{ s | replace('o', '0') }}{{ s | replace('o', '0', 1) }}", "{{ s | reverse }}{{ numbers | reverse | list }}", "{{ words | unique | list }}{{ [1, 1, 2] | unique | list }}", "{{ s | list }}", "{{ [1, 2, 3, 4, 5] | batch(2) | list }}", "{{ [1, 2, 3, 4, 5] | slice(2) | list }}",
    "{{ 'a\nb\n\nc' | indent }}", "{{ 'a\nb\n\nc' | indent(2, true) }}", "{{ 'a\nb' | indent(width=3, first=true, blank=true) }}", "{{ 3.7 | int }}{{ '12' | int }}{{ 'x' | int }}{{ '3.9' | int }}{{ 'x' | int(5) }}", "{{ '1.5' | float }}{{ 3 | float }}", "{{ 2.567 | round(2) }}{{ 2.5 | round }}{{ 3.5 | round }}{{ 2.1 | round(0, 'ceil') }}{{ 2.9 | round(method='floor') }}", "{{ -3 | abs }}",
    "{{ s | wordcount }}", "{{ 'ab' | center(6) }}|", "{{ 'a b/ü' | urlencode }}", "{{ '<b>x</b> y' | striptags }}", "{{ {'a': 1, 'b': none} | xmlattr }}", "{{ '<&>' | escape }}{{ '<&>' | e }}", "{{ '<a>' | safe }}", "{{ '%s-%s' | format('a', 1) }}", "{{ s | truncate(8) }}", "{{ s | wordwrap(5) }}", "{{ d | attr('z') }}|", "{{ 1000000 | filesizeformat }}", "{{ d | items | list }}", "{{ [1,[2]] | pprint }}", "{{ s | nope }}",
    # Tests
    "{{ d is mapping }}{{ words is mapping }}{{ words is sequence }}{{ s is sequence }}{{ d is sequence }}{{ s is iterable }}{{ words is iterable }}{{ 1 is iterable }}{{ s is string }}{{ 1 is string }}", "{{ 1 is number }}{{ 1.0 is float }}{{ 1 is integer }}{{ yes is boolean }}{{ yes is integer }}{{ yes is number }}{{ none is none }}{{ yes is true }}{{ 0 is false }}",
    "{{ 1 is odd }}{{ 2 is even }}{{ 1 is eq 1 }}{{ 1 is ne 2 }}{{ 2 is gt 1 }}{{ 1 is in [1] }}{{ 'a' is lower }}{{ 'A' is upper }}", "{{ x is defined }}{{ x is undefined }}{{ s is defined }}{{ d.q is undefined }}", "{{ s is callable }}{{ range is callable }}", "{{ 1 is sameas 1 }}{{ none is sameas none }}", "{{ s is filter }}{{ 'upper' is filter }}{{ 'odd' is test }}", "{{ undefined_name is none }}{{ undefined_name is string }}{{ undefined_name is mapping }}{{ undefined_name is iterable }}{{ undefined_name is sequence }}",
    # Statements
    "{% set ns = namespace(x=0) %}{% for i in numbers %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "{% for i in numbers %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}", "{% for i in numbers %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }};{% endfor %}", "{% for i in numbers %}{{ loop.changed(i) }}{% endfor %}",
    "{% for i in numbers if i > 1 %}{{ i }}{{ loop.index }}{% else %}none{% endfor %}{% for i in empty %}{% else %}none{% endfor %}", "{% for i in numbers %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}", "{% for i in [1, [2, [3]]] recursive %}{% if i is number %}{{ i }}{% else %}({{ loop(i) }}){% endif %}{% endfor %}", "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(a=5, b=6) }}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, a=3) }}",
    "{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}in{% endcall %}", "{% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(3) }}", "{% set x %}a{{ 1 }}{% endset %}[{{ x }}]{{ x | upper }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set (a, b) = ('x', 'y') %}{{ a }}{{ b }}", "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}", "{% filter upper %}abc{% endfilter %}", "{% raw %}{{ x }}{% endraw %}", "{# comment #}x", "{%- if true -%}  a  {%- endif -%} b",
    "{% if d %}1{% elif s %}2{% else %}3{% endif %}", "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}{% for i in [1] %}{% set x = 3 %}{% endfor %}{{ x }}", "{% for a, b in [[1, 2], [3, 4]] %}{{ a }}{{ b }}{% endfor %}", "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "{{ 'a' 'b' }}", "{{ \"it's\" }}{{ 'say \"x\"' }}{{ '\\n\\t\\\\' }}", "{% generation %}g{% endgeneration %}", "{{ raise_exception('no') }}", "{% do 1 %}", "{% include 'x' %}", "{{ strftime_now('%d %b %Y') }}", "{{ namespace(_x=1) }}", "{{ self }}", "{{ lipsum is defined }}{{ cycler is defined }}{{ joiner is defined }}",
    "{% set j = joiner(', ') %}{{ j() }}a{{ j() }}b", "{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "{{ dict(d, q=1).q }}", "{% set x = [] %}{% set x = x + [1] %}{{ x }}", "{{ [x for x in numbers] }}", "{{ {'a': 1}.a }}{{ {'a': 1}['a'] }}", "{{ (numbers | length > 2) and s is string }}", "{{ numbers | map('string') | join }}", "{{ s[:5] + '...' }}", "{{ (s ~ '!') | length }}", "{{ none | upper }}", "{{ 5 | upper }}", "{{ none | trim }}", "{{ none ~ '' }}", "{{ numbers | join(' ') | trim }}",
]
