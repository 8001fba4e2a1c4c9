"""Which texts count as English."""

import pytest

from anabranch.text.language import is_english


@pytest.mark.parametrize(
    "text",
    [
        "How long do refunds take?",
        "celery task timeout default",
        "AGGREGATOR_RATE_LIMIT",
        "What does the café in Besançon sell?",
        "Who wrote El amor en los tiempos del cólera, and when was it published?",
        "",
        "| `port` | 8001 | the port |",
    ],
)
def test_english_questions_and_keywords_are_english(text: str) -> None:
    assert is_english(text)


@pytest.mark.parametrize(
    "text",
    [
        "Wann werden Retouren bezahlt?",
        "Wie lange dauert die Erstattung für gedruckte Bücher?",
        "¿Cuánto tarda el reembolso?",
        "Quand les retours sont-ils remboursés ?",
        "Quanto tempo serve per il rimborso? Non sono sicuro",
        "Hoe lang duurt het voor een boek?",
        "退款需要多长时间?",
        "Сколько времени занимает возврат?",
        "返金にはどのくらいかかりますか?",
    ],
)
def test_questions_in_other_languages_are_not_english(text: str) -> None:
    assert not is_english(text)
