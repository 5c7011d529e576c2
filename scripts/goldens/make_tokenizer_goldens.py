#!/usr/bin/env python3
"""Train small tokenizers and record what sentencepiece and transformers make of multilingual text and code.

    make_tokenizer_goldens.py [OUT_DIR]          default: tests/goldens/tokenizers beside this script's parent folder
    make_tokenizer_goldens.py --check TOKENIZE   compare a large sample with target/.../examples/tokenize (cargo build
                                                 -p text --example tokenize), with the tokenizers in OUT_DIR

Each case is a folder: the tokenizer's files as a checkpoint would have them, and golden.json with the token ids of each
text of samples.json and the text that they decode to. Seeds are fixed; the code is this project's own at the time.
Needs sentencepiece, tokenizers, transformers and protobuf.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import sentencepiece

ROOT = pathlib.Path(__file__).resolve().parents[2]

SENTENCES = """
The ship left the harbour at dawn, and nobody on the quay knew when it would return.
Das Schiff verließ den Hafen im Morgengrauen; die Größe der Flotte überraschte jeden.
Le navire quitta le port à l’aube, « sans bruit », et l’équipage chantait déjà.
El barco salió del puerto al amanecer: ¿quién sabe cuándo volverá? ¡Nadie!
A nave deixou o porto ao amanhecer, e ninguém no cais soube quando voltaria.
La nave lasciò il porto all'alba; perché nessuno la salutò?
Statek opuścił port o świcie, a żółte żagle błyszczały w słońcu.
Loď opustila přístav za úsvitu a nikdo nevěděl, kdy se vrátí.
Hajnalban a hajó elhagyta a kikötőt, és senki sem tudta, mikor tér vissza.
Gemi şafakta limandan ayrıldı; İstanbul'un ışıkları sönüyordu.
Tàu rời cảng lúc bình minh, và không ai biết khi nào nó sẽ trở lại.
Корабль вышел из гавани на рассвете, и никто не знал, когда он вернётся.
Корабель вийшов із гавані на світанку; її вітрила світилися.
Το πλοίο έφυγε από το λιμάνι την αυγή και κανείς δεν ήξερε πότε θα γυρίσει.
הספינה עזבה את הנמל עם שחר, ואיש לא ידע מתי תשוב.
غادرت السفينة الميناء عند الفجر، ولم يعرف أحد متى ستعود.
کشتی در سپیده‌دم بندر را ترک کرد و هیچ‌کس نمی‌دانست کی بازمی‌گردد.
जहाज़ भोर में बंदरगाह से निकला और कोई नहीं जानता था कि वह कब लौटेगा।
জাহাজটি ভোরে বন্দর ছেড়ে গেল, আর কেউ জানত না কখন ফিরবে।
கப்பல் விடியற்காலையில் துறைமுகத்தை விட்டுச் சென்றது.
ఓడ తెల్లవారుజామున ఓడరేవును విడిచి వెళ్ళింది.
เรือออกจากท่าเรือตอนรุ่งสาง และไม่มีใครรู้ว่าจะกลับมาเมื่อไร
船は夜明けに港を出た。いつ戻るのか、誰も知らなかった。カタカナとﾊﾝｶｸも。
黎明时分，船离开了港口，没有人知道它什么时候回来。
黎明時分，船離開了港口，沒有人知道它甚麼時候回來。
배는 새벽에 항구를 떠났고, 언제 돌아올지 아무도 몰랐다.
ნავი გამთენიისას ნავსადგურიდან გავიდა.
Նավը լուսաբացին դուրս եկավ նավահանգստից։
መርከቡ ጎህ ሲቀድ ወደቡን ለቆ ወጣ።
Meli iliondoka bandarini alfajiri, na hakuna aliyejua itarudi lini.
Skipið fór úr höfninni í dögun; þá söng áhöfnin ævagamla vísu.
""".strip().splitlines()

# What normalisation, white space and byte fallback stumble over.
ODDITIES = [
    "", " ", "  ", "\n", "\t\t", "a", " a", "a ", "  a  b   c  ", "\u3000全角　スペース", "a\u00a0b\u2009c\u200bd", "\r\n\r\n x",
    "ＡＢＣ１２３ｶﾞ", "ﬁne ﬀ ﬄ", "½ ² ℃ ™ № ㎏ ㍿", "é e\u0301 ё е\u0308", "가 \u1100\u1161", "क़ \u0915\u093c", "\u1e9b\u0323", "Å Å Å",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "a\u0000b", "\u0001\u0002\u001f", "\ufeffBOM", "\u2028\u2029", "▁▁a▁b", "\u202eabc\u202c",
    "1234567890 3.14159 1e-9 0xFF", "don't we'll I'M it's", "....!!!???", "aaaaaaaaaaaaaaaaaaaaaaaa", "abababababababababab",
    "<0x41><0x0A>", "<unk>", "<pad>", "x<y>z</y>", "https://example.org/a?b=c&d=%20#e", "user@example.org", "ÀÈÌÒÙ àèìòù ñ ç ß ẞ",
    "\U0010ffff\ue000\ufdd0", "ﷺ", "Ǆǅǆ", "ı İ i I", "ſ K Ω", "zero\u200dwidth\u200cjoiners", "tab\tseparated\tvalues\n1\t2\t3\n",
]

SPECIAL_TEXTS = [
    "<s>hello</s>", "a<s> b </s> c", " <s>x", "</s></s>", "x</s>\n\ny", "[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nWhy? [/INST] So.",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "a <|endoftext|> b", "<|im_start|><|im_start|>", "x <mask> y<mask>z",
    "<extra_id_0> is <extra_id_1>.", "before<extra_id_99>after",
]


def code_files():
    return sorted(path for folder in ("src/text", "src/engine", "kernels/cuda", "scripts") for path in (ROOT / folder).rglob("*")
                  if path.suffix in {".rs", ".py", ".cu", ".cuh", ".toml"} and "goldens" not in str(path))


def code_lines():
    return [line for path in code_files() for line in path.read_text().splitlines() if line.strip()]


def mixtures(count, seed):
    """Strings of characters drawn from everywhere, with spaces, lone or in runs."""
    rng = random.Random(seed)
    ranges = [(0x20, 0x7e), (0xa0, 0x24f), (0x300, 0x36f), (0x370, 0x52f), (0x590, 0x6ff), (0x900, 0xdff), (0xe00, 0xfff), (0x1100, 0x11ff),
              (0x1e00, 0x206f), (0x2070, 0x2bff), (0x3000, 0x30ff), (0x3130, 0x33ff), (0x4e00, 0x9fff), (0xac00, 0xd7a3), (0xf900, 0xffef),
              (0x1d400, 0x1d7ff), (0x1f300, 0x1faff), (0x20000, 0x2a6df)]
    texts = []
    for _ in range(count):
        text = ""
        for _ in range(rng.randrange(1, 12)):
            low, high = rng.choice(ranges[:4] if rng.random() < 0.4 else ranges)
            text += "".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(1, 6))) + " " * rng.choice([0, 0, 1, 1, 2, 5])
        texts.append(text)
    return texts


def spliced(count, seed):
    """Pieces of sentences and code run into each other."""
    rng = random.Random(seed)
    pool = SENTENCES + code_lines() + ODDITIES
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 5)):
            part = rng.choice(pool)
            start = rng.randrange(len(part) + 1)
            parts.append(part[start:start + rng.randrange(1, 60)])
        texts.append(rng.choice(["", " ", "\n", "  "]).join(parts))
    return texts


def samples():
    rng = random.Random(7)
    return SENTENCES + ODDITIES + mixtures(60, 1) + spliced(80, 2) + rng.sample(code_lines(), 60)


def large_sample():
    """The whole sources, file by file and line by line, and many mixtures."""
    files = [path.read_text() for path in code_files()]
    return samples() + files + code_lines() + mixtures(20000, 3) + spliced(20000, 4) + special_mixtures(5000, 5)


def special_mixtures(count, seed):
    rng = random.Random(seed)
    tokens = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<extra_id_7>", "[INST]", "<mask>"]
    pieces = SENTENCES + ODDITIES + tokens * 8
    return ["".join(rng.choice(pieces)[:40] + rng.choice(["", "", " ", "\n"]) for _ in range(rng.randrange(1, 7))) for _ in range(count)]


def train(folder, name="tokenizer.model", change=None, **options):
    """Trains on sentences and code, so that both have pieces."""
    from sentencepiece import sentencepiece_model_pb2 as pb
    folder.mkdir(parents=True, exist_ok=True)
    corpus = [line for line in SENTENCES * 4 + code_lines()[:6000] + mixtures(200, 9) if "\0" not in line]
    with tempfile.TemporaryDirectory() as scratch:
        prefix = str(pathlib.Path(scratch) / "m")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus), model_prefix=prefix, vocab_size=1400, character_coverage=0.98, num_threads=1,
            minloglevel=2, hard_vocab_limit=False, **options)
        proto = pb.ModelProto()
        proto.ParseFromString(pathlib.Path(prefix + ".model").read_bytes())
    for secret in ("input", "model_prefix"):
        proto.trainer_spec.ClearField(secret)
    if change:
        change(proto)
    (folder / name).write_bytes(proto.SerializeToString())


def disuse(proto):
    """Takes every seventh longer piece out of use; what is made of it is taken apart again."""
    for index, piece in enumerate(proto.pieces):
        if index % 7 == 0 and piece.type == 1 and len(piece.piece) > 2:
            piece.type = 5


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def make_llama(folder):
    train(folder, model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
          split_digits=True, allow_whitespace_only_pieces=True)
    write(folder, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "add_eos_token": False,
                                    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
          added_tokens={"<|im_start|>": 1400, "<|im_end|>": 1401})


def make_legacy(folder):
    make_llama(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, tokenizer_config=config | {"legacy": True, "add_bos_token": False, "add_eos_token": True})


def make_unused(folder):
    train(folder, change=disuse, model_type="bpe", byte_fallback=True, normalization_rule_name="nfkc", split_digits=True,
          user_defined_symbols=["[INST]", "é", "    "])


def make_bpe_nfkc(folder):
    train(folder, model_type="bpe", normalization_rule_name="nmt_nfkc", user_defined_symbols=["<mask>", "ab", "ation"],
          control_symbols=["<pad>", "<sep>"])


def make_no_prefix(folder):
    train(folder, model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
          add_dummy_prefix=False, split_digits=True, user_defined_symbols=["<reserved_1>"])
    write(folder, tokenizer_config={"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False, "add_eos_token": False})


def make_t5(folder):
    train(folder, name="spiece.model", model_type="unigram", normalization_rule_name="nmt_nfkc", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write(folder, tokenizer_config={"tokenizer_class": "T5Tokenizer", "extra_ids": 100})


def make_unigram(folder):
    train(folder, change=disuse, model_type="unigram", byte_fallback=True, normalization_rule_name="nmt_nfkc_cf",
          treat_whitespace_as_suffix=True, user_defined_symbols=["<mask>", "ab", "ation"])


def make_gpt2(folder, **config):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
                                  special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(SENTENCES * 4 + code_lines()[:6000], trainer)
    tokenizer.model.save(str(folder))
    write(folder, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"} | config)


def make_qwen2(folder):
    added = {str(1000 + index): {"content": token, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
             for index, token in enumerate(["<|im_start|>", "<|im_end|>"])}
    make_gpt2(folder, tokenizer_class="Qwen2Tokenizer", eos_token="<|endoftext|>", added_tokens_decoder=added)


class SentencePiece:
    """The reference for a model alone."""

    def __init__(self, folder):
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(next(folder.glob("*.model"))))

    def encode(self, text):
        return self.model.encode(text)

    def decode(self, ids):
        # A special token gives no text.
        return self.model.decode([id for id in ids if not self.model.is_unknown(id)])


class Transformers:
    """The reference for a model with its added tokens."""

    def __init__(self, folder):
        from transformers import GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer
        name = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        kind = {"LlamaTokenizer": LlamaTokenizer, "T5Tokenizer": T5Tokenizer, "GPT2Tokenizer": GPT2Tokenizer, "Qwen2Tokenizer": Qwen2Tokenizer}[name]
        self.tokenizer = kind.from_pretrained(folder)

    def encode(self, text):
        return self.tokenizer.encode(text)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def is_undisputed(text):
    """Whether transformers agrees with the model: it puts no space before a stretch of text that starts with one."""
    for token in ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"):
        text = text.replace(token, "\0")
    return not any(part.startswith((" ", "\u2581")) for part in text.split("\0"))


def special_texts(name, count):
    texts = SPECIAL_TEXTS + special_mixtures(count, 5)
    return texts if name == "t5" else [text for text in texts if is_undisputed(text)]


# Added tokens, begin and end: what transformers makes of texts with such tokens in them.
SPECIAL_CASES = {"llama": "auto", "legacy": "auto", "t5": "t5"}

# How a folder is made, its reference for the model alone, and the parameter `tokenizer_type`.
CASES = {
    "llama": (make_llama, SentencePiece, "auto"),
    "legacy": (make_legacy, SentencePiece, "auto"),
    "unused": (make_unused, SentencePiece, "auto"),
    "bpe_nfkc": (make_bpe_nfkc, SentencePiece, "auto"),
    "no_prefix": (make_no_prefix, SentencePiece, "auto"),
    "t5": (make_t5, SentencePiece, "t5"),
    "unigram": (make_unigram, SentencePiece, "auto"),
    "gpt2": (make_gpt2, Transformers, "auto"),
    "qwen2": (make_qwen2, Transformers, "auto"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=ROOT / "tests/goldens/tokenizers")
    parser.add_argument("--check", metavar="TOKENIZE")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(check(arguments.out, arguments.check))
    texts = samples()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "samples.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n")
    for name, (make, reference, tokenizer_type) in CASES.items():
        folder = arguments.out / name
        make(folder)
        golden = {"tokenizer_type": tokenizer_type, "model": record(reference(folder), texts)}
        if name in SPECIAL_CASES:
            special = special_texts(name, 60)
            golden["special"] = {"samples": special, "ids": [Transformers(folder).encode(text) for text in special]}
        (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
        print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e3:.0f} kB")


def record(reference, texts):
    ids = [reference.encode(text) for text in texts]
    return {"ids": ids, "texts": [reference.decode(row) for row in ids]}


def tokenize(program, folder, tokenizer_type, texts, *more):
    """Ids and text of each of `texts`, by the program under test."""
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    run = subprocess.run([program, str(folder), tokenizer_type, *more], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in run.stdout.split("\n")[:-1]]


def check(out, program):
    texts, wrong = large_sample(), 0
    for name, (_, reference, tokenizer_type) in CASES.items():
        folder = out / name
        reference = reference(folder)
        different, tokens = [], 0
        for text, found in zip(texts, tokenize(program, folder, tokenizer_type, texts, "plain"), strict=True):
            if isinstance(reference, SentencePiece) and any(token in text for token in ("<s>", "</s>", "<unk>", "<pad>", "<|im", "<extra_id", "<mask>")):
                continue  # Added tokens are not the model's.
            ids = reference.encode(text)
            tokens += len(ids)
            if [ids, reference.decode(ids)] != found:
                different.append(text)
        wrong += report(name, tokens, texts, different)
    for name, tokenizer_type in SPECIAL_CASES.items():
        folder, special = out / name, special_texts(name, 20000)
        reference, found = Transformers(folder), tokenize(program, folder, tokenizer_type, special)
        ids = [reference.encode(text) for text in special]
        different = [text for text, ids, found in zip(special, ids, found, strict=True) if ids != found[0]]
        wrong += report(f"{name} with added tokens", sum(map(len, ids)), special, different)
    return int(wrong > 0)


def report(name, tokens, texts, different):
    print(f"{name}: {tokens} tokens, {len(different)} of {len(texts)} texts differ", *map(repr, different[:3]), sep="\n  ", flush=True)
    return len(different)


if __name__ == "__main__":
    main()
