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
        "The Café Müller opened in 1921.",
        "Die Hard is a film of 1988.",
        "El Capitan is a rock in Yosemite.",
        "Il Postino won a prize.",
        "Los Angeles Lakers",
        "Leonardo da Vinci painted Mona Lisa.",
        "Patients die young.",
        "Beyoncé headlined Coachella.",
        "IL-4 and IL-5 are secreted",
        "Fool.com deletes de-identified data.",
    ],
)
def test_english_with_foreign_names_and_keywords_are_english(text: str) -> None:
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
        "Die Rückgabe kostet 7 Euro.",
        "Kosten: sieben Euro.",
        "Il costo è 7 euro in Austria.",
        "La tarifa es de 7 euros.",
        "Le musée ouvre à 9 heures.",
        "L'entrée coûte 12 euros.",
        "Die Bahn fährt.",
        "Der Eintritt kostet 12 Euro.",
        "El museo abre a las 9.",
    ],
)
def test_texts_in_other_languages_are_not_english(text: str) -> None:
    assert not is_english(text)
