"""Chat templates that somebody wrote against the process that renders them.

Each either writes a text of bounded size, or is refused in bounded time and memory; none may end
the process that asks. `slow`: it burns its whole time or memory first.
"""

from typing import NamedTuple


class Hostile(NamedTuple):
    """A template by name. slow: it takes all the time or memory that it may have."""

    name: str
    template: str
    slow: bool = False


def _nested(depth: int, body: str, items: str = "range(99999)") -> str:
    loops = "".join(f"{{% for i{n} in {items} %}}" for n in range(depth))
    return loops + body + "{% endfor %}" * depth


_DOUBLED = "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(64) %}"

LOOPS = (
    Hostile("two loops", _nested(2, ""), slow=True),
    Hostile("four loops that write", _nested(4, "x"), slow=True),
    Hostile("a loop over a wide range", "{% for i in range(10**12) %}{% endfor %}"),
    Hostile("a loop over text", "{% for a in 'x' * 10**7 %}{% for b in 'x' * 10**7 %}"
            "{% endfor %}{% endfor %}", slow=True),
    Hostile("a sum of products", "{{ range(99999) | map('string') | join | list | length }}"),
    Hostile("a list of lists", "{{ (range(99999) | list) * 99999 }}", slow=True),
    Hostile("a namespace that counts", "{% set ns = namespace(n=0) %}"
            + _nested(3, "{% set ns.n = ns.n + 1 %}"), slow=True),
    Hostile("a cycle", _nested(2, "{{ loop.cycle('a', 'b') }}"), slow=True),
    Hostile("a recursive loop", "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}"),
    Hostile("batches", "{{ range(99999) | batch(1) | map('batch', 1) | list | length }}"),
    Hostile("slices", "{{ range(99999) | slice(10**9) | list | length }}", slow=True),
    Hostile("groups in groups", _nested(2, "{{ range(999) | groupby(0) }}", "range(9999)"),
            slow=True),
    Hostile("sorting", _nested(2, "{{ range(99999) | sort | length }}", "range(9999)"), slow=True),
    Hostile("uniques", _nested(2, "{{ range(9999) | unique | list }}", "range(999)"), slow=True),
    Hostile("a cycler", "{% set c = cycler(1, 2) %}" + _nested(3, "{{ c.next() }}"), slow=True),
    Hostile("a joiner", "{% set j = joiner('x') %}" + _nested(3, "{{ j() }}"), slow=True),
)  # fmt: skip
SIZES = (
    Hostile("a long string", "{{ 'x' * 10**9 }}"),
    Hostile("a string beyond memory", "{{ 'x' * 10**13 }}"),
    Hostile("a long list", "{{ [0] * 10**10 }}"),
    Hostile("a long list of the message", "{{ [messages[0]['content']] * 10**9 }}"),
    Hostile("doubling", _DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"),
    Hostile("doubling by plus", _DOUBLED + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"),
    Hostile("doubling by join", _DOUBLED + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}"),
    Hostile("doubling by replace", _DOUBLED
            + "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}{{ ns.x }}"),
    Hostile("doubling by method", _DOUBLED
            + "{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}{{ ns.x }}"),
    Hostile("doubling a list", "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}"
            "{% set ns.x = ns.x + ns.x %}{% endfor %}"),
    Hostile("a width of percent", '{{ "%1000000000d" % 1 }}'),
    Hostile("a width beyond memory", '{{ "%100000000000000d" % 1 }}'),
    Hostile("a width of format", "{{ '{:>1000000000}'.format(1) }}"),
    Hostile("a width of a width", "{{ '{:>{}}'.format(1, 10**9) }}"),
    Hostile("the format filter", "{{ '%1000000000s' | format('x') }}"),
    Hostile("center", "{{ 'x'.center(10**9) }}"),
    Hostile("the center filter", "{{ 'x' | center(10**9) }}"),
    Hostile("ljust", "{{ 'x'.ljust(10**9) }}"),
    Hostile("zfill", "{{ 'x'.zfill(10**9) }}"),
    Hostile("expandtabs", "{{ '\t'.expandtabs(10**9) }}"),
    Hostile("joined by a long string", "{{ ('x' * 10**6).join('y' * 10**4) }}"),
    Hostile("indented", "{{ ('x\n' * 10**5) | indent(10**5) }}"),
    Hostile("indented deeply", "{{ 'x\ny' | indent(10**10) }}"),
    Hostile("wrapped", "{{ ('x' * 10**6) | wordwrap(1) }}"),
    Hostile("wrapped by long lines", "{{ ('x ' * 10**5) | wordwrap(1, wrapstring='y' * 10**5) }}"),
    Hostile("translated", "{{ ('x' * 10**5).translate({120: 'y' * 10**6}) }}"),
    Hostile("json indented", "{{ [[[[1]]]] | tojson(indent=10**9) }}"),
    Hostile("json separated", "{{ range(9999) | list | tojson(separators=('x' * 10**6, ':')) }}"),
    Hostile("encoded", "{{ ('x' * 10**8).encode('utf-32') | length }}"),
    Hostile("printed", "{{ (['x' * 10**6] * 10**4) | pprint }}"),
    Hostile("a power", "{{ 10 ** 10 ** 9 }}", slow=True),
    Hostile("a power of powers", "{{ (9 ** 9 ** 9) % 7 }}", slow=True),
    Hostile("a shift by products", "{{ (2 ** 99999999) * (2 ** 99999999) | length }}", slow=True),
    Hostile("digits", "{{ (10 ** 5000) | string }}"),
    Hostile("an int of digits", "{{ ('9' * 10**6) | int }}"),
    Hostile("lorem ipsum", "{{ lipsum(n=10**6) }}", slow=True),
    Hostile("endless writing", _nested(3, "{{ 'x' * 10**6 }}"), slow=True),
    Hostile("five million characters", "{{ 'x' * (5 * 10**6) }}"),
    Hostile("a file of sizes", "{{ 10**15 | filesizeformat }}{{ 'x' * 10**8 }}"),
)  # fmt: skip
NESTING = (
    Hostile("a macro that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    Hostile("macros that call each other",
            "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}"
            "{{ a() }}"),
    Hostile("a macro that calls itself twice",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(60) }}", slow=True),
    Hostile("a call block in itself",
            "{% macro m() %}{{ caller() }}{{ m() }}{% endmacro %}{% call m() %}x{% endcall %}"),
    Hostile("deep parentheses", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    Hostile("deep lists", "{{ " + "[" * 5000 + "]" * 5000 + " }}"),
    Hostile("deep ifs", "{% if 1 %}" * 2000 + "{% endif %}" * 2000),
    Hostile("deep loops", _nested(150, "x", "[1]")),
    Hostile("a long sum", "{{ 1" + " + 1" * 20000 + " }}"),
    Hostile("a long chain of nots", "{{ " + "not " * 20000 + "1 }}"),
    Hostile("a long chain of filters", "{{ 'x'" + " | upper" * 20000 + " }}"),
    Hostile("data nested by a loop", "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
            "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}"),
    Hostile("nested data printed", "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
            "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"),
    Hostile("nested data compared", "{% set ns = namespace(x=[], y=[]) %}"
            "{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}"
            "{{ ns.x == ns.y }}"),
    Hostile("nested dicts freed", "{% set ns = namespace(x={}) %}{% for i in range(99999) %}"
            "{% set ns.x = {'x': ns.x} %}{% endfor %}done"),
)  # fmt: skip
PATTERNS = (
    Hostile("tags that do not end", "{{ ('<' * 10**6) | striptags }}", slow=True),
    Hostile("comments that do not end", "{{ ('<!--' * 10**5) | striptags }}", slow=True),
    Hostile("addresses", "{{ ('www.' * 10**5) | urlize }}", slow=True),
    Hostile("brackets of addresses", "{{ ('(' * 10**5 ~ 'http://x' ~ ')' * 10**5) | urlize }}",
            slow=True),
    Hostile("titles", "{{ ('x ' * 10**6) | title | length }}"),
    Hostile("words", "{{ ('x ' * 10**6) | wordcount }}"),
    Hostile("splitting", "{{ ('x,' * 10**7).split(',') | length }}"),
)  # fmt: skip
ESCAPES = (
    Hostile("the class of text", "{{ ''.__class__.__mro__ }}"),
    Hostile("subclasses", "{{ ''.__class__.__base__.__subclasses__() }}"),
    Hostile("attr", "{{ '' | attr('__class__') }}"),
    Hostile("globals of a function", "{{ raise_exception.__globals__ }}"),
    Hostile("globals of a lambda", "{{ strftime_now.__globals__['os'] }}"),
    Hostile("globals of lipsum", "{{ lipsum.__globals__['os'].popen('id').read() }}"),
    Hostile("the environment of self", "{{ self.__init__.__globals__ }}"),
    Hostile("self's template", "{{ self._TemplateReference__context.environment }}"),
    Hostile("init of a cycler", "{{ cycler.__init__.__globals__.os }}"),
    Hostile("format by attribute", "{{ '{0.__class__}'.format('') }}"),
    Hostile("format_map", "{{ '{a.__class__}'.format_map({'a': ''}) }}"),
    Hostile("format by alias", "{{ ''.format.__self__ }}"),
    Hostile("map of attributes", "{{ [''] | map(attribute='__class__') | list }}"),
    Hostile("group by class", "{{ [''] | groupby('__class__') }}"),
    Hostile("a namespace's class", "{% set ns = namespace() %}{% set ns.__class__ = 1 %}"),
    Hostile("a namespace by name", "{{ namespace(__init__=1) }}"),
    Hostile("including a file", "{% include '/etc/passwd' %}"),
    Hostile("importing a file", "{% import '/etc/passwd' as x %}"),
    Hostile("extending a file", "{% extends '/etc/passwd' %}"),
    Hostile("appending to messages", "{{ messages.append({'role': 'x', 'content': 'y'}) }}"),
    Hostile("changing a message", "{{ messages[0].update({'content': 'y'}) }}"),
    Hostile("clearing messages", "{{ messages.clear() }}"),
    Hostile("the context's name", "{{ context }}"),
    Hostile("code of a macro", "{% macro m() %}{% endmacro %}{{ m.__code__ }}"),
    Hostile("frames of a generator", "{{ (messages | map('upper')).gi_frame }}"),
    Hostile("mro by percent", "{{ '%(x)s' % {'x': ''.__class__} }}"),
)  # fmt: skip
OUTPUTS = (
    Hostile("half a surrogate pair", "{{ '\\ud800' }}"),
    Hostile("the other half", "{{ messages[0]['content'] ~ '\\udfff' }}"),
    Hostile("a surrogate in an error", "{{ raise_exception('\\ud800') }}"),
    Hostile("a long error", "{{ raise_exception('x' * 10**8) }}"),
    Hostile("an error that is no text", "{{ raise_exception([1, 2]) }}"),
    Hostile("an error without words", "{{ raise_exception('') }}"),
    Hostile("zeros", "{{ '\\x00' * 100 }}"),
    Hostile("nothing", "{# nothing #}"),
    Hostile("a division", "{{ 1 / 0 }}"),
    Hostile("an index", "{{ [][5][6] }}"),
    Hostile("an undefined call", "{{ nothing() }}"),
    Hostile("a wrong filter", "{{ 1 | no_filter }}"),
    Hostile("a broken block", "{% for"),
    Hostile("an unclosed quote", "{{ 'x }}"),
    Hostile("text and numbers", "{{ 'x' + 1 }}"),
    Hostile("a date of nothing", "{{ strftime_now(1) }}"),
    Hostile("a long date", "{{ strftime_now('%Y' * 10**7) }}"),
    Hostile("a date with a zero", "{{ strftime_now('\\x00%Y') }}"),
    Hostile("generation unclosed", "{% generation %}x"),
    Hostile("breaking out of nothing", "{% break %}"),
    Hostile("json of what is no json", "{{ namespace() | tojson }}"),
    Hostile("json of undefined", "{{ nothing | tojson }}"),
    Hostile("an int of nonsense", "{{ dict('x') }}"),
    Hostile("a keyword twice", "{{ dict(a=1, **{'a': 2}) }}"),
    Hostile("a template of zeros", "\x00" * 100),
    Hostile("an assertion", "{{ [1] | first(2) }}"),
    Hostile("a random choice of nothing", "{{ [] | random }}"),
    Hostile("a stop", "{{ ([] | map('upper')).__next__() }}"),
)  # fmt: skip
ALL = (*LOOPS, *SIZES, *NESTING, *PATTERNS, *ESCAPES, *OUTPUTS)
