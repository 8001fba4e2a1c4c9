"""Recognises text of documents that gives orders to a language model, by rules in several languages. It marks what
looks like an order. It does not find every one, and what it marks may be harmless: docs/prompt-injection.md."""

# ruff: noqa: RUF001  letters of many languages

import base64
import binascii
import html
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from urllib.parse import unquote

from anabranch.text.normal_forms import normal_form
from anabranch.text.untrusted import visible

MAX_READ = 20_000
MAX_FOUND = 5
MAX_QUOTE = 200
MAX_DECODED = 20
# A search for a rule holds the interpreter: it begins within so many characters, and no match is longer than LONGEST.
AT_ONCE, LONGEST = 2_000, 1_000
MIN_ENCODED = 13
# So many characters without width in a row are no accident.
HIDDEN = re.compile("[\u200b-\u200d\u2060-\u2064\ufeff]{8,}|[\u202d\u202e]|[\ufe00-\ufe0f\U000e0100-\U000e01ef]{4,}")
TAGS = re.compile("[\U000e0020-\U000e007e]{4,}")
BASE64 = re.compile(r"(?<![\w+/])[A-Za-z0-9+/]{24,4000}={0,2}(?![\w+/])")
HEX = re.compile(r"(?<!\w)(?:[0-9a-fA-F]{2}[ ]?){16,2000}(?!\w)")
SPACED = re.compile(r"(?<![^\W_])(?:[^\W_][ .*_-]{1,3}){6,200}[^\W_](?![^\W_])")
SHORT_WORDS = re.compile(r"(?<!\S)\S{1,2}(?: {1,3}\S{1,2}){6}")
SENTENCE_ENDS = ".!?\n。！？।"
LETTERS = str.maketrans("авеікмнорстухѕјԁαεικνορτυχ", "abeikmhopctyxsjdaeikvoptux")

MODEL = r"(?:ai|llm|language model|chat ?bot|assistant|chatgpt|gpt|claude|gemini|copilot|model)"
REST = r"[^.!?\n]{0,60}?"

# The first words are cheap to look for: a rule is only tried on a text that has one of them.
RULES: tuple[tuple[tuple[str, ...], str], ...] = (
    (  # set aside what was said before
        (
            "ignor",
            "disregard",
            "forget",
            "overr",
            "bypass",
            "discard",
            "neglect",
            "do not",
            "don't",
            "stop ",
            "instead of",
        ),
        r"\b(?:ignor(?:e|ing)|disregard|forget|override|overrule|bypass|discard|neglect|(?:do not|don't"
        r"|stop) (?:follow|obey)"
        r"(?:ing)?)\b.{0,20}?\b(?:all|any|every(?:thing)?|previous|prior|above|earlier|preceding|your|these"
        r"|those|other|system"
        rf"|what)\b{REST}(?:\b(?:instruction|prompt|guideline|directive|rule|order|command|message|constraint"
        rf"|restriction"
        r"|passage|document)s?\b|\b(?:told|said|written) (?:before|above|earlier|so far)|\babove\b|\bbefore\b)",
    ),
    (  # another role, mode or task
        (
            "you are now",
            "from now on",
            "pretend",
            " mode",
            "you must",
            "you will",
            "your new",
            "act as",
            "new task",
            "you shall",
        ),
        r"\byou are now (?:an?|the|dan|called|acting|free|unrestricted|my)\b(?! (?:few|step|position))"
        r"|\bfrom now on,? (?:you"
        r"|answer|respond|reply|always|act|every)\b|\bpretend (?:to be|that you|you are)\b|\b(?:enter|enable"
        r"|activate|switch"
        r"(?: in)?to|you are in) (?:developer|debug|god|dan|admin|jailbreak|unrestricted) mode\b"
        r"|\byou (?:must|will|shall)"
        r" (?:now )?(?:obey|comply|only (?:answer|reply|respond|say|output)|(?:answer|reply|respond) only"
        r"|answer every)\b"
        r"|\byour new (?:task|role|instructions?|goal|job|objective|rules?)\b|\bact as (?:dan"
        r"|an? (?:unrestricted|unfiltered"
        r"|evil|uncensored))\b|\byou must (?:say|answer|reply|respond|recommend|claim|state that)\b",
    ),
    (  # addressed to a model
        (" ai ", " ai,", " ai:", " ais ", "llm", " model", "bot", "assistant", "gpt", "claude", "gemini", "copilot"),
        rf"\b(?:note|message|instructions?|attention|important|memo|reminder|directive|notice|order)s? (?:to"
        rf"|for) (?:the |all "
        rf"|any |every |an? )?(?:\w+ )?{MODEL}s?\b|\bif you are an? (?:\w+ )?{MODEL}\b|\b(?:dear|hey|hello"
        rf"|attention,?"
        rf"|hi),? (?:ai|llm|chatbot|chatgpt|gpt|claude|gemini|copilot|ai \w+|language model)\b|\b(?:ai|llm|language)"
        r" (?:assistant|model|agent|system)s?,? (?:reading|processing|summari[sz]ing|that reads?|which reads?"
        r"|who reads?|are"
        r" instructed|must (?:now )?(?:answer|reply|respond|say|tell|recommend|ignore|include|state|follow|obey))\b"
        r"|\bas an ai\b[^.!?\n]{0,60}\byou (?:must|should|will)\b",
    ),
    (  # tell what is secret
        (
            "prompt",
            "instructions",
            "password",
            "credential",
            "api key",
            "secret",
            "history",
            "so far",
            "messages",
            "token",
        ),
        r"\b(?:reveal|print|repeat|output|leak|disclose|recite|expose|append|write out|email|send|show"
        r"|display|tell)\b"
        r"[^.!?\n]{0,60}\b(?:(?:system|hidden|initial|original|secret) prompt|your (?:own |secret "
        r"|hidden )?(?:instructions"
        r"|prompt|rules|secrets?)|(?:all|any|the user's|users') (?:\w+ )?(?:passwords?|credentials|api keys?"
        r"|secrets)|(?:chat"
        r"|conversation) (?:history|so far)|previous messages|user's (?:question|data|e-?mail|messages?|last))\b",
    ),
    (  # what to answer
        (
            "your ",
            "every a",
            "every r",
            "each a",
            "each r",
            "asked",
            "asks ",
            "you answer",
            "you respond",
            "you summ",
            "the user",
            "the reader",
            "the customer",
            "the human",
            "do not ",
            "only ",
            "exactly ",
            "nothing but ",
            " just ",
        ),
        r"\b(?:include|add|append|insert|put|place|mention"
        r"|end|begin|start|state|recommend|finish|close)\b[^.!?\n]{0,80}\b(?:your|every|each) (?:answer|reply"
        r"|response|output"
        r"|summary)\b|\b(?:when|if|whenever)(?: you are)? (?:asked|(?:a|the|any) user asks|anyone asks"
        r"|someone asks|you (?:are"
        r" asked|answer|respond|summari[sz]e))\b[^.!?\n]{0,100}\b(?:say|answer|respond|reply|tell|state|claim"
        r"|recommend|output)"
        r"\b|\b(?:tell|assure|convince|urge|persuade) the (?:user|reader|customer|human)s? (?:that|to|how)\b"
        r"|\bdo not (?:tell"
        r"|inform|warn|alert) the (?:user|reader|human)\b|\bdo not (?:mention|cite|quote"
        r"|use) (?:this (?:instruction|message"
        r"|note)|(?:the |any )?other (?:document|passage|source)s)\b|\b(?:answer|respond|reply|say"
        r"|output)(?: with)? (?:only"
        r"|exactly|just|nothing but) (?:the (?:word|phrase|text|sentence)|with|this|[\"'“])",
    ),
    (  # the form of a prompt or of a conversation
        (
            "system",
            "assistant",
            "<|",
            "inst",
            "instruction",
            "</",
            "developer",
            "user question",
            "[end",
            "end of",
            "prompt",
        ),
        r"(?:^|\n)\W{0,8}(?:system|developer|assistant|admin(?:istrator)?)(?: (?:prompt|message|instructions?"
        r"|override|note"
        r"|update"
        r"|command))\b\s*[:>\]=-]|(?:^|\n)\W{0,8}(?:system|assistant|human|user)\s*:\s*(?:you|ignore|please|from|new"
        r"|answer|i will|ok|sure|say|reply|the (?:user|rules))\b|<\|(?:im_start|im_end|system|user|assistant"
        r"|endoftext|eot_id"
        r"|start_header_id)\|>|\[/?inst\]|<</?sys>>|</(?:documents?|passages?|context|system|instructions?"
        r"|untrusted\w*)"
        r"(?:-\w{1,40})?>|\b(?:new|updated|additional|revised|secret|real"
        r"|actual) (?:system )?(?:instructions?|prompt)s?"
        r"\s*(?::|\]|-{2,}|={2,})"
        r"|\bend of (?:the )?(?:documents?|passages?|context|material|untrusted (?:data|input))\b\W{0,4}"
        r"(?:\n|$|now\b|new\b|system\b)|(?:^|\n)\W{0,8}user question\s*:",
    ),
    (  # send something away in an address
        ("image", "link", "url", "markdown", "pixel", "!["),
        r"\b(?:append|add|include|render|embed|insert|output|show|display|write"
        r"|load)\b[^.!?\n]{0,60}\b(?:image|link|url"
        r"|markdown|pixel)\b.{0,120}\b(?:question|answer|conversation|secrets?|passwords?|history|prompt"
        r"|base64|encoded|user's"
        r"|user data)\b|!\[[^\]\n]{0,100}\]\([^)\n]{0,300}[=/](?:\{|<|\[|\$|%7b|\.\.\.|base64\()",
    ),
    (  # German, Dutch, Swedish
        (
            "ignorier",
            "vergiss",
            "vergessen sie",
            "missacht",
            "befolge",
            "du bist",
            "ab jetzt",
            "ab sofort",
            "systemprompt",
            "negeer",
            "vergeet",
            "ignorera",
            "antworte ",
        ),
        rf"\b(?:ignorier\w*|vergiss|vergessen sie|missacht\w+|befolge\w* (?:nicht|keine)|negeer|vergeet"
        rf"|ignorera){REST}(?:anweisung"
        r"|instruktion|regel|vorgabe|befehl|prompt|bisherige|vorherige|instructies|opdracht|aanwijzing)"
        r"|\bdu bist (?:jetzt|nun"
        rf"|ab sofort)\b|\bab (?:jetzt|sofort)\b{REST}(?:antwort|bist du|befolg)|\b(?:gib|verrate|zeige?|nenne){REST}"
        r"(?:systemprompt|system-prompt|passw[oö]rt|deine anweisungen)|\bantworte (?:nur|immer|ausschliesslich)\b",
    ),
    (  # French, Spanish, Portuguese, Italian
        (
            "ignor",
            "oubli",
            "olvid",
            "esque",
            "desconsider",
            "dimentic",
            "non seguire",
            "no sigas",
            "tu es ",
            "vous êtes ",
            "ahora eres",
            "a partir de a",
            "agora você",
            "ora sei",
            "ora in poi",
            "réponds",
            "responde",
            "révèle",
            "revela",
            "affiche",
            "muestra",
        ),
        rf"\b(?:ignor\w+|oubli(?:e|es|ez)|n['’]obéi\w*|olvid[ae]\w*|omite|no sigas|no obedezcas|esque[çc]\w+"
        rf"|desconsider\w+"
        rf"|dimentic\w+|non seguire){REST}(?:instruction|consigne|règle|ordre|directive|instrucci|reglas"
        rf"|[óo]rdenes|indicaci"
        r"|instruç|regras|ordens|istruzion|regole|ordini)|\b(?:tu es|vous êtes) (?:maintenant|désormais)\b"
        r"|\bahora eres\b"
        r"|\ba partir de (?:ahora|agora)\b|\bagora você é\b|\b(?:ora sei|d['’]ora in poi|da ora in poi)\b"
        r"|\bréponde?[zs]? "
        rf"(?:uniquement|seulement|toujours)|\bresponde (?:s[óo]lo|solamente|únicamente|siempre)\b|\b(?:révèle"
        rf"|affiche|répète"
        rf"|revela|muestra|imprime){REST}(?:prompt|mots? de passe|consignes|contraseña|senha|tus instrucciones)",
    ),
    (  # Russian, Polish, Turkish, Indonesian, Vietnamese
        (
            "игнорируй",
            "забудь",
            "теперь ты",
            "отныне",
            "покажи",
            "раскрой",
            "ignoruj",
            "zapomnij",
            "talimat",
            "kural",
            "abaikan",
            "bỏ qua",
            "не обращай",
        ),
        rf"(?:игнорируй\w*|забудь\w*|не обращай\w* внимания){REST}(?:инструкц|указани|правил|команд|приказ)"
        rf"|\b(?:теперь ты|отныне"
        rf" ты)\b|(?:покажи|раскрой){REST}(?:промпт|парол|инструкц)|\b(?:zignoruj|ignoruj"
        rf"|zapomnij){REST}(?:instrukcj|polece"
        rf"|zasad)|(?:talimat|kural|komut)\w*{REST}(?:yok say|unut|görmezden gel|dikkate alma)"
        rf"|\babaikan{REST}(?:instruksi"
        rf"|perintah|aturan)|\bbỏ qua{REST}(?:hướng dẫn|chỉ dẫn|lệnh)",
    ),
    (  # Chinese, Japanese, Korean
        (
            "忽略",
            "无视",
            "忽视",
            "忘记",
            "忘掉",
            "不要理会",
            "不要遵守",
            "無視",
            "你现在是",
            "从现在",
            "系统提示",
            "忘れ",
            "今から",
            "무시",
            "잊",
        ),
        r"(?:忽略|无视|忽视|忘记|忘掉|不要理会|不要遵守|無視)[^。!?\n]{0,30}(?:指令|指示|提示|规则|規則|说明"
        r"|命令|要求|内容)|你现在是"
        r"|从现在(?:开始|起)|(?:输出|显示|透露|告诉我)[^。!?\n]{0,30}(?:系统提示|密码|提示词)|(?:指示|命令"
        r"|ルール|プロンプト|指令)[^。!?\n]"
        r"{0,20}(?:無視|忘れ)|(?:あなたは今から|今からあなたは)|(?:지시|명령|지침|규칙"
        r"|프롬프트)[^.!?\n]{0,20}(?:무시|잊)",
    ),
    (  # Arabic, Hindi
        ("تجاهل", "لا تتبع", "अनदेखा", "नज़रअंदाज़", "नजरअंदाज", "भूल जा"),
        rf"(?:تجاهل|لا تتبع){REST}(?:تعليمات|أوامر|قواعد)|(?:निर्देश|नियम|आदेश)[^।.!?\n]{{0,40}}(?:अनदेखा"
        rf"|नज़रअंदाज़|नजरअंदाज|भूल)",
    ),
    (  # disguised: ROT13, backwards, digits for letters
        ("vtaber", "qvfertneq", "snoitcurtsni", "1gn0r", "ign0r", "1gnor", "1nstruct"),
        r"\b(?:vtaber|qvfertneq)\b.{0,60}\b(?:vafgehpgvba|cebzcg|ehyr)f?\b|\bsnoitcurtsni\b"
        r"|\b[i1]gn[o0]r[e3]\b.{0,60}"
        r"\b[i1]n[s5][t7]ruc[t7][i1][o0]n[s5]?\b",
    ),
)


def suspected_instructions(text: str) -> tuple[str, ...]:
    """Sentences that seem to give orders to a model, as one reads them: decoded, without invisible characters, in lower
    case. At most MAX_FOUND, of the first MAX_READ characters."""
    text = text[:MAX_READ]
    found = dict.fromkeys(_found(text))
    return tuple(found)[:MAX_FOUND]


def _found(text: str) -> Iterator[str]:
    plain = _plain(text)
    yield from _by_rules(plain)
    if not text.isascii():
        for hidden in TAGS.finditer(text):
            yield f"hidden: {''.join(chr(ord(one) - 0xE0000) for one in hidden[0])[:MAX_QUOTE]}"
        if HIDDEN.search(text):
            yield "hidden: characters without width, or against the direction of writing"
        if (latin := plain.translate(LETTERS)) != plain:
            yield from _by_rules(latin)
    for decoded in _decoded(text):
        yield from _by_rules(_plain(decoded))


def _plain(text: str) -> str:
    """As a reader sees it: entities and percent signs decoded, one form for each letter, in lower case."""
    if "&" in text:
        text = html.unescape(text)
    if "%20" in text:
        text = unquote(text)
    text = visible(text)
    return normal_form(text, "NFKC").casefold()


def _decoded(text: str) -> Iterator[str]:
    """What is written in base64, in hexadecimal digits, or with something after each letter."""
    long = " ".join(word for word in text.split() if len(word) >= MIN_ENCODED)
    shredded = text if SHORT_WORDS.search(text) else long
    for run in islice(BASE64.finditer(long), MAX_DECODED):
        yield _as_text(run[0], lambda one: base64.b64decode(one + "=" * (-len(one) % 4)))
    for run in islice(HEX.finditer(shredded), MAX_DECODED):
        yield _as_text(run[0], bytes.fromhex)
    for run in islice(SPACED.finditer(shredded), MAX_DECODED):
        yield _joined_letters(run[0])


def _as_text(run: str, decode: Callable[[str], bytes]) -> str:
    try:
        return decode(run).decode()
    except (binascii.Error, ValueError):
        return ""


def _joined_letters(run: str) -> str:
    """`i g n o r e   a l l` as words: a wider gap is between words."""
    return re.sub(r"[ .*_-]+", lambda gap: " " if len(gap[0]) > 1 else "", run)


def _by_rules(text: str) -> Iterator[str]:
    for first, rule in _compiled():
        if any(word in text for word in first):
            for start, end in _matches(rule, text):
                yield _sentence(text, start, end)


def _matches(rule: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    at = 0
    for part in range(0, len(text), AT_ONCE):
        at = max(at, part)
        while at < part + AT_ONCE and (found := rule.search(text, at, part + AT_ONCE + LONGEST)) is not None:
            if found.start() >= part + AT_ONCE:
                break
            yield found.span()
            at = found.end()


@cache
def _compiled() -> tuple[tuple[tuple[str, ...], re.Pattern[str]], ...]:
    """With the first question: compiling them takes longer than importing everything else here."""
    return tuple(
        (tuple(normal_form(word, "NFKC") for word in first), re.compile(normal_form(rule, "NFKC")))
        for first, rule in RULES
    )


def _sentence(text: str, start: int, end: int) -> str:
    """The sentence of a match, or as much of it as a quote may have."""
    first = max(text.rfind(stop, max(0, start - MAX_QUOTE), start) for stop in SENTENCE_ENDS) + 1 or max(0, start - 20)
    last = min((at for stop in SENTENCE_ENDS if (at := text.find(stop, end, end + MAX_QUOTE)) >= 0), default=end + 80)
    return " ".join(text[first : last + 1].split())[:MAX_QUOTE]
