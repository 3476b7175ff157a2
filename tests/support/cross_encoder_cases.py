"""Variants of a cross-encoder's folder, and the pairs that each scores.

`tests/data/cross_encoders.json` has the scores that sentence-transformers gives them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import processors

from tests.support.golden import randomise

TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizers" / "wordpiece" / "tokenizer.json"
SHORT, LONG = "the flour", "A recipe for sourdough: flour, water, salt, and a long night of rest."
QUERY = "How do I bake bread?"
PAIRS = ((QUERY, LONG), (QUERY, SHORT), (SHORT, QUERY), (LONG, LONG), (LONG, SHORT))
BERT_PAIR = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
SIZES = {
    "vocab_size": 600,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OF_MODERNBERT = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
OF_DECODER = {"num_key_value_heads": 1, "head_dim": 4}
LONG = OF_DECODER | {"max_position_embeddings": 128}
TIED = OF_DECODER | {"tie_word_embeddings": True}
OF_DISTILBERT = {"dim": 12, "hidden_dim": 16, "n_layers": 2, "n_heads": 3}
TOKENS = {
    "tokenizer_class": "BertTokenizer",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
    "do_lower_case": True,
}
TYPES = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
# BertTokenizer of transformers 5.24 replaces the template of tokenizer.json by BERT's.
AS_IN_THE_FILE = TYPES | {"tokenizer_class": "PreTrainedTokenizerFast"}
NN = "torch.nn.modules"


@dataclass(frozen=True)
class CrossEncoderCase:
    """A folder; with `settings` it has modules.json and config_sentence_transformers.json."""

    name: str
    family: str = "Bert"
    sizes: dict[str, Any] = field(default_factory=dict)
    labels: int = 1
    pair: str | None = BERT_PAIR  # None: joined as RoBERTa does
    tokens: dict[str, Any] = field(default_factory=dict)  # of tokenizer_config.json
    config: dict[str, Any] = field(default_factory=dict)  # added to config.json
    settings: dict[str, Any] | None = None
    transformer: dict[str, Any] = field(default_factory=dict)  # sentence_bert_config.json
    scale: float = 0.4  # of the last layer of the head
    is_causal: bool = False  # a decoder with the head of its vocabulary
    logit_score: dict[str, Any] | None = None  # the config of this module

    @property
    def flags(self) -> dict[str, Any]:
        """The settings of the engine without which the folder is no cross-encoder."""
        is_bare = self.is_causal and self.logit_score is None
        return {"pooling": "logit_score"} if is_bare else {}

    def write(self, folder: Path) -> Path:
        """Write the folder and return it."""
        import transformers

        config = getattr(transformers, f"{self.family}Config")(
            **SIZES | {"num_labels": self.labels} | self.sizes
        )
        kind = "CausalLM" if self.is_causal else "SequenceClassification"
        model = getattr(transformers, f"{self.family}For{kind}")(config)
        randomise(model, SIZES["hidden_size"])
        head = HEADS.get(self.family, "classifier")
        with torch.no_grad():
            model.get_parameter(f"{'lm_head' if self.is_causal else head}.weight").mul_(self.scale)
        model.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | self.config))
        self._tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS | self.tokens))
        if self.settings is None:
            return folder
        self._write_modules(folder)
        return folder

    def _write_modules(self, folder: Path) -> None:
        assert self.settings is not None
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
        if self.logit_score is not None:
            kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
            modules.append({"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind})
            (folder / "1_LogitScore").mkdir()
            (folder / "1_LogitScore" / "config.json").write_text(json.dumps(self.logit_score))
        settings = {"model_type": "CrossEncoder"} | self.settings
        transformer = {
            "transformer_task": "sequence-classification",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "scores",
        }
        if self.is_causal:
            transformer |= {
                "transformer_task": "text-generation",
                "module_output_name": "causal_logits",
            }
        for name, content in (
            ("modules.json", modules),
            ("config_sentence_transformers.json", settings),
            ("sentence_bert_config.json", transformer | self.transformer),
        ):
            (folder / name).write_text(json.dumps(content))

    def _tokenizer(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
        ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        if self.pair is None:
            tokenizer.post_processor = processors.RobertaProcessing(ends[1], ends[0])
        else:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", pair=self.pair, special_tokens=ends
            )
        return tokenizer


# The last layer of a head.
HEADS = dict.fromkeys(("Roberta", "XLMRoberta", "Camembert", "MPNet"), "classifier.out_proj")
HEADS |= dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3"), "score")
SIGMOID, IDENTITY = f"{NN}.activation.Sigmoid", f"{NN}.linear.Identity"
SOFTMAX = f"{NN}.activation.Softmax"
OLDER = "sbert_ce_default_activation_function"
PROMPTS = {"prompts": {"ask": "the question: "}, "default_prompt_name": "ask"}
BACKEND = {"tokenizer_class": "TokenizersBackend"}
CHAT = (
    "{% for m in messages if m.role == 'document' %}the {{ m.content }}{% endfor %} flour: "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}[SEP]"
)
CHAT_OF_PARTS = (
    "{% for m in messages %}{{ m.role }}: {{ m['content'][0]['text'] }}[SEP]{% endfor %}"
    "{% if add_generation_prompt %}the answer{% endif %}"
)
CAUSAL_LOGITS = {"method": "forward", "method_output_name": "logits"}
READS_CHATS = {"text": CAUSAL_LOGITS, "message": CAUSAL_LOGITS | {"format": "structured"}}
CAUSAL: dict[str, Any] = {
    "family": "Qwen3",
    "sizes": OF_DECODER,
    "pair": "$A:0 $B:1",
    "tokens": BACKEND,
    "is_causal": True,
}
CHATTING = CAUSAL | {"sizes": LONG, "tokens": BACKEND | {"chat_template": CHAT}}
OF_ROBERTA: dict[str, Any] = {"sizes": {"type_vocab_size": 1}, "pair": None}
ROBERTA = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 60}
CASES = (
    CrossEncoderCase("bert"),
    CrossEncoderCase("roberta", "Roberta", tokens=ROBERTA, **OF_ROBERTA),
    CrossEncoderCase("xlm-roberta", "XLMRoberta", tokens=ROBERTA, **OF_ROBERTA),
    CrossEncoderCase("distilbert", "DistilBert", OF_DISTILBERT),
    CrossEncoderCase("mpnet", "MPNet", tokens=ROBERTA, pair=None),
    CrossEncoderCase("gte", "Gte", {"type_vocab_size": 2}, tokens=TYPES),
    CrossEncoderCase("modernbert", "ModernBert", OF_MODERNBERT | {"classifier_pooling": "mean"}),
    CrossEncoderCase("modernbert of the first token", "ModernBert", OF_MODERNBERT),
    *(
        CrossEncoderCase(name.lower(), name, OF_DECODER, pair="$A:0 $B:1", tokens=BACKEND)
        for name in ("Llama", "Mistral", "Qwen3")
    ),
    CrossEncoderCase(
        "qwen3 with padding at the end",
        "Qwen3",
        OF_DECODER | {"pad_token_id": 3},
        pair="$A:0 $B:1 [SEP]:1 [SEP]:1",
        tokens=ROBERTA,
    ),
    CrossEncoderCase(
        "qwen3 without padding",
        "Qwen3",
        OF_DECODER | {"pad_token_id": None},
        pair="$A:0 $B:1 [SEP]:1",
        tokens=ROBERTA,
        settings={},
    ),
    CrossEncoderCase("yes and no", **CAUSAL),
    CrossEncoderCase("yes and no, tied", **CAUSAL | {"sizes": TIED}),
    CrossEncoderCase(
        "two tokens",
        **CAUSAL,
        settings={"activation_fn": None},
        logit_score={"true_token_id": 9, "false_token_id": 40},
    ),
    CrossEncoderCase(
        "one token",
        **CAUSAL,
        settings={"activation_fn": IDENTITY},
        logit_score={"true_token_id": 9, "module_input_name": "causal_logits"},
    ),
    CrossEncoderCase("chat, bare", **CHATTING),
    CrossEncoderCase(
        "chat of a prompt and parts",
        **CAUSAL | {"sizes": LONG, "tokens": BACKEND | {"chat_template": CHAT_OF_PARTS}},
        settings=PROMPTS,
        transformer={
            "modality_config": READS_CHATS,
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        logit_score={"true_token_id": 9, "false_token_id": 40},
    ),
    CrossEncoderCase(
        "chat that is not read",
        **CAUSAL | {"sizes": LONG, "tokens": BACKEND | {"chat_template": CHAT}},
        settings={},
        transformer={"modality_config": {"text": READS_CHATS["text"]}},
        logit_score={"true_token_id": 9, "false_token_id": 40},
    ),
    CrossEncoderCase("chat of a head", "Qwen3", LONG, tokens=BACKEND | {"chat_template": CHAT}),
    CrossEncoderCase("no types by the class", tokens={"tokenizer_class": "TokenizersBackend"}),
    CrossEncoderCase("types without a class", tokens={"tokenizer_class": None}),
    CrossEncoderCase("types by name", tokens=AS_IN_THE_FILE),
    CrossEncoderCase("no types by name", tokens={"model_input_names": ["input_ids"]}),
    CrossEncoderCase(
        "no types in the template",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0",
        tokens=AS_IN_THE_FILE,
    ),
    CrossEncoderCase(
        "types from the separator on",
        pair="[CLS]:0 $A:0 [SEP]:1 $B:1 [SEP]:1",
        tokens=AS_IN_THE_FILE,
    ),
    CrossEncoderCase("no special tokens", pair="$A:0 $B:1", tokens=AS_IN_THE_FILE),
    CrossEncoderCase("three labels", labels=3),
    CrossEncoderCase("softmax", labels=3, settings={"activation_fn": SOFTMAX}),
    CrossEncoderCase("sigmoids", labels=3, config={OLDER: SIGMOID}),
    CrossEncoderCase("identity", config={OLDER: "torch.nn.Identity"}),
    CrossEncoderCase("null", config={OLDER: None}, settings={"activation_fn": None}),
    CrossEncoderCase(
        "own settings first",
        config={"sentence_transformers": {"activation_fn": SIGMOID}},
        settings={"activation_fn": IDENTITY},
    ),
    CrossEncoderCase(
        "config before the older key",
        config={"sentence_transformers": {"activation_fn": None}, OLDER: IDENTITY},
    ),
    CrossEncoderCase("regression", config={"problem_type": "regression"}),
    CrossEncoderCase("prompt", settings=PROMPTS),
    CrossEncoderCase(
        "settings of vectors", settings=PROMPTS | {"model_type": "SentenceTransformer"}
    ),
    CrossEncoderCase("longest pair of the tokenizer", tokens={"model_max_length": 16}),
    CrossEncoderCase(
        "longest pair of the module",
        tokens={"model_max_length": 40},
        settings={},
        transformer={"max_seq_length": 21},
    ),
)
