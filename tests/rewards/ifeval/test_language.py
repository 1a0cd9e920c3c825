import unicodedata

import pytest

from postgrad.rewards.ifeval.commonest import COMMONEST, LETTERS
from postgrad.rewards.ifeval.whole import LANGUAGES, is_written_in, main_script

PUBLISHED = (
    "en es pt ar hi fr ru de ja it bn uk th ur ta te bg ko pl he fa vi ne sw kn mr gu pa ml fi"
)
TEXTS = {
    "en": "The children walk to school every morning, and their teacher is waiting for them.",
    "es": "Los niños van a la escuela todas las mañanas y su maestra los espera en la puerta.",
    "pt": "As crianças vão para a escola todas as manhãs e a professora espera por elas na porta.",
    "fr": "Les enfants vont à l'école tous les matins et leur maîtresse les attend à la porte.",
    "de": "Die Kinder gehen jeden Morgen zur Schule, und ihre Lehrerin wartet an der Tür auf sie.",
    "it": "I bambini vanno a scuola ogni mattina e la loro maestra li aspetta davanti alla porta.",
    "pl": "Dzieci chodzą do szkoły każdego ranka, a ich nauczycielka czeka na nie przy drzwiach.",
    "vi": "Trẻ em đi học mỗi buổi sáng và cô giáo của các em đang chờ ở trước cửa lớp.",
    "sw": "Watoto huenda shule kila asubuhi na mwalimu wao anawasubiri katika mlango wa darasa.",
    "fi": "Lapset kävelevät kouluun joka aamu, ja heidän opettajansa odottaa, että he tulevat.",
    "nl": "De kinderen lopen elke ochtend naar school en hun juf wacht bij de deur op hen.",
    "sv": "Barnen går till skolan varje morgon och deras lärare väntar på dem vid dörren.",
    "tr": "Çocuklar her sabah okula gider ve öğretmenleri onları kapıda bekler, bu çok güzel.",
    "id": "Anak-anak pergi ke sekolah setiap pagi dan guru mereka menunggu di depan pintu.",
    "ro": "Copiii merg la școală în fiecare dimineață, iar învățătoarea lor îi așteaptă la ușă.",
    "cs": "Děti chodí do školy každé ráno a jejich učitelka na ně čeká u dveří, protože je ráda.",
    "ru": "Дети ходят в школу каждое утро, и учительница ждёт их у двери.",
    "uk": "Діти ходять до школи щоранку, і вчителька чекає на них біля дверей.",
    "bg": "Децата ходят на училище всяка сутрин и учителката ги чака до вратата.",
    "ar": "يذهب الأطفال إلى المدرسة كل صباح والمعلمة تنتظرهم عند الباب.",
    "fa": "بچه ها هر روز صبح به مدرسه می روند و معلم در کنار در منتظر آنها است.",
    "ur": "بچے ہر صبح اسکول جاتے ہیں اور ان کی استانی دروازے پر ان کا انتظار کرتی ہے۔",
    "hi": "बच्चे हर सुबह स्कूल जाते हैं और उनकी शिक्षिका दरवाज़े पर उनका इंतज़ार करती है।",
    "mr": "मुले दररोज सकाळी शाळेत जातात आणि त्यांची शिक्षिका दारात त्यांची वाट पाहत आहे.",
    "ne": "बालबालिकाहरू हरेक बिहान विद्यालय जान्छन् र उनीहरूको शिक्षिका ढोकामा पर्खिरहेकी छ।",
    "bn": "শিশুরা প্রতিদিন সকালে স্কুলে যায়।",
    "gu": "બાળકો દરરોજ સવારે શાળાએ જાય છે.",
    "pa": "ਬੱਚੇ ਹਰ ਸਵੇਰ ਸਕੂਲ ਜਾਂਦੇ ਹਨ।",
    "kn": "ಮಕ್ಕಳು ಪ್ರತಿದಿನ ಬೆಳಿಗ್ಗೆ ಶಾಲೆಗೆ ಹೋಗುತ್ತಾರೆ.",
    "ml": "കുട്ടികൾ എല്ലാ ദിവസവും രാവിലെ സ്കൂളിൽ പോകുന്നു.",
    "ta": "குழந்தைகள் தினமும் காலையில் பள்ளிக்குச் செல்கிறார்கள்.",
    "te": "పిల్లలు ప్రతి ఉదయం పాఠశాలకు వెళతారు.",
    "th": "เด็ก ๆ ไปโรงเรียนทุกเช้า",
    "he": "הילדים הולכים לבית הספר בכל בוקר.",
    "el": "Τα παιδιά πηγαίνουν στο σχολείο κάθε πρωί.",
    "ko": "아이들은 매일 아침 학교에 갑니다.",
    "ja": "子供たちは毎朝学校へ行きます。",
    "zh": "孩子们每天早上去学校。",
}


@pytest.mark.parametrize("code", sorted(TEXTS))
def test_a_text_is_in_its_own_language_and_in_no_other(code):
    assert [other for other in sorted(LANGUAGES) if is_written_in(other, TEXTS[code])] == [code]


@pytest.mark.parametrize("code", sorted(TEXTS))
def test_case_does_not_change_the_language(code):
    assert is_written_in(code, TEXTS[code].upper())


def test_every_language_of_the_paper_can_be_told():
    assert set(PUBLISHED.split()) <= LANGUAGES
    assert set(TEXTS) == LANGUAGES


def test_most_letters_decide_the_script():
    assert main_script("Привет, the world of words") == "LATIN"
    assert main_script("42! ***") is None
    assert main_script("東京タワー") == "JAPANESE"
    assert not is_written_in("zh", "東京タワー")
    assert is_written_in("ja", TEXTS["ja"] + " (school)")


def test_text_without_letters_is_in_no_language():
    assert not any(is_written_in(code, "26. ***") for code in LANGUAGES)


def test_few_words_that_tell_nothing_are_taken_for_the_main_language_of_their_script():
    assert is_written_in("en", "YES")
    assert not is_written_in("it", "YES")
    assert is_written_in("en", "lorem " * 19)
    assert not is_written_in("en", "lorem " * 20)


def test_one_word_of_a_language_does_not_make_a_long_text_one_of_it():
    assert is_written_in("fr", "voiture " * 38 + "est")
    assert not is_written_in("fr", "voiture " * 39 + "est")


def test_a_country_after_the_code_is_not_looked_at():
    assert is_written_in("zh-tw", TEXTS["zh"])
    assert is_written_in("pt-BR", TEXTS["pt"])


def test_a_letter_of_one_language_is_in_no_word_of_the_others_that_share_its_script():
    for code, letters in LETTERS.items():
        for other in set(COMMONEST) - {code}:
            foreign_words = {word for word in COMMONEST[other] if letters & set(word)}
            assert foreign_words == set(), (code, other)


@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73", "\u0344"])
def test_a_long_run_of_accents_takes_no_quadratic_time(marks):
    text = "the cat and the dog are in the garden of a"
    assert is_written_in("en", text + marks * 300_000)
    assert is_written_in("vi", "một a" + marks * 300_000 + " của tôi và bạn")


def test_a_language_is_told_however_its_letters_are_composed():
    composed = "Đây là một ví dụ về tiếng Việt của chúng tôi"
    for form in ("NFC", "NFD"):
        assert is_written_in("vi", unicodedata.normalize(form, composed))
