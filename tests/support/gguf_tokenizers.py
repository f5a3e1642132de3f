"""Small tokenizers, and GGUF files with one in the header."""

import io

import gguf_pairs
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

LIKE_GEMMA = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
LIKE_GEMMA |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "unk_piece": "<unk>"}
"""Names and places of the special tokens."""


def trained_pieces(texts, **options):
    """A SentencePiece model of these texts."""
    made = io.BytesIO()
    options = {"sentence_iterator": iter(texts), "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(model_writer=made, **options)
    return made.getvalue()


def sentence_pieces(kind="unigram"):
    """A vocabulary as Gemma's."""
    texts = ["the quick brown fox jumps over the lazy dog", "hello world"] * 9
    options = {"model_type": kind, "vocab_size": 40 if kind == "unigram" else 320, "byte_fallback": kind == "bpe"}
    turns = ["<start_of_turn>", "<end_of_turn>"]
    return trained_pieces(texts, user_defined_symbols=turns, **options, **LIKE_GEMMA)


def byte_pairs():
    """A ``tokenizer.json`` as Llama 3's and Qwen's."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    merges = [["t", "h"], ["th", "e"], ["Ġ", "q"], ["o", "x"]]
    words = [*letters, *("".join(pair) for pair in merges)]
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special += ["<|endoftext|>", "<|im_end|>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"content": word, "id": len(words) + i, **flags} for i, word in enumerate(special)],
        "pre_tokenizer": cut,
        "decoder": cut,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": merges},
    }


def gguf_with_tokenizer(tmp_path, monkeypatch, model_type, add, *, vocab_size=gguf_pairs.VOCABULARY):
    """A small model whose header carries a tokenizer too."""
    described = gguf_pairs.describe
    monkeypatch.setitem(gguf_pairs.COMMON, "vocab_size", vocab_size)
    monkeypatch.setattr(gguf_pairs, "describe", lambda writer, config: (described(writer, config), add(writer)))
    return gguf_pairs.write(tmp_path, model_type, "Q8_0")[0]


def add_pieces(writer):
    model = sentencepiece_model_pb2.ModelProto.FromString(sentence_pieces("bpe"))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in model.pieces])
    writer.add_token_scores([piece.score for piece in model.pieces])
    writer.add_token_types([piece.type for piece in model.pieces])
    for add, number in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{add}_token_id")(number)
    writer.add_chat_template("{{ bos_token }}")


def add_byte_pairs(writer):
    described = byte_pairs()
    words = [*described["model"]["vocab"], *(token["content"] for token in described["added_tokens"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(words.index("<|begin_of_text|>"))
    writer.add_eos_token_id(words.index("<|end_of_text|>"))
