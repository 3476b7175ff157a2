"""Architecture name (config.json's `architectures`) -> model class, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engine.errors import ConfigError, listed
from engine.protocol.ready import ModelKind

DECODERS = {
    "GPT2LMHeadModel": ("engine.models.gpt2", "GPT2"),
    "GPTNeoXForCausalLM": ("engine.models.gpt_neox", "GPTNeoX"),
    "LlamaForCausalLM": ("engine.models.llama", "Llama"),
    "MistralForCausalLM": ("engine.models.mistral", "Mistral"),
    "Ministral3ForCausalLM": ("engine.models.ministral3", "Ministral3"),
    "Mistral3ForConditionalGeneration": ("engine.models.ministral3", "Mistral3"),
    "MixtralForCausalLM": ("engine.models.mixtral", "Mixtral"),
    "Qwen2ForCausalLM": ("engine.models.qwen2", "Qwen2"),
    "Qwen2MoeForCausalLM": ("engine.models.qwen2_moe", "Qwen2Moe"),
    "Qwen3ForCausalLM": ("engine.models.qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": ("engine.models.qwen3_moe", "Qwen3Moe"),
    "GemmaForCausalLM": ("engine.models.gemma", "Gemma"),
    "Gemma2ForCausalLM": ("engine.models.gemma2", "Gemma2"),
    "Gemma3ForCausalLM": ("engine.models.gemma3", "Gemma3"),
    "Gemma3ForConditionalGeneration": ("engine.models.gemma3", "SeeingGemma3"),
    "Exaone4ForCausalLM": ("engine.models.exaone4", "Exaone4"),
    "Idefics3ForConditionalGeneration": ("engine.models.idefics3", "Idefics3"),
    "SmolVLMForConditionalGeneration": ("engine.models.idefics3", "Idefics3"),
    "LlavaNextForConditionalGeneration": ("engine.models.llava", "LlavaNext"),
    "LlavaOnevisionForConditionalGeneration": ("engine.models.llava", "LlavaOnevision"),
    "Qwen2_5_VLForConditionalGeneration": ("engine.models.qwen2_5_vl", "Qwen25VL"),
    "Qwen3VLForConditionalGeneration": ("engine.models.qwen3_vl", "Qwen3VL"),
    "GlmForCausalLM": ("engine.models.glm", "Glm"),
    "Glm4ForCausalLM": ("engine.models.glm4", "Glm4"),
    "SeedOssForCausalLM": ("engine.models.seed_oss", "SeedOss"),
    "ArceeForCausalLM": ("engine.models.arcee", "Arcee"),
    "OlmoeForCausalLM": ("engine.models.olmoe", "Olmoe"),
    "GraniteMoeForCausalLM": ("engine.models.granite_moe", "GraniteMoe"),
    "StableLmForCausalLM": ("engine.models.stablelm", "StableLM"),
    "Starcoder2ForCausalLM": ("engine.models.starcoder2", "Starcoder2"),
    "Gemma4ForCausalLM": ("engine.models.gemma4", "Gemma4"),
    "Gemma4ForConditionalGeneration": ("engine.models.gemma4", "SeeingGemma4"),
    "GraniteForCausalLM": ("engine.models.granite", "Granite"),
    "GraniteMoeHybridForCausalLM": ("engine.models.granite_hybrid", "GraniteHybrid"),
    "Olmo2ForCausalLM": ("engine.models.olmo2", "Olmo2"),
    "Olmo3ForCausalLM": ("engine.models.olmo3", "Olmo3"),
    "SmolLM3ForCausalLM": ("engine.models.smollm3", "SmolLM3"),
    "CohereForCausalLM": ("engine.models.cohere", "Cohere"),
    "Cohere2ForCausalLM": ("engine.models.cohere2", "Cohere2"),
    "Phi3ForCausalLM": ("engine.models.phi3", "Phi3"),
    "Qwen3NextForCausalLM": ("engine.models.qwen3_next", "Qwen3Next"),
    "Qwen3_5ForCausalLM": ("engine.models.qwen3_5", "Qwen35"),
    "Qwen3_5ForConditionalGeneration": ("engine.models.qwen3_5", "SeeingQwen35"),
    "Qwen3_5MoeForCausalLM": ("engine.models.qwen3_5_moe", "Qwen35Moe"),
    "Qwen3_5MoeForConditionalGeneration": ("engine.models.qwen3_5_moe", "SeeingQwen35Moe"),
    "Lfm2ForCausalLM": ("engine.models.lfm2", "Lfm2"),
    "Lfm2MoeForCausalLM": ("engine.models.lfm2_moe", "Lfm2Moe"),
    "GptOssForCausalLM": ("engine.models.gpt_oss", "GptOss"),
    "DeepseekV2ForCausalLM": ("engine.models.deepseek_v2", "DeepseekV2"),
    "DeepseekV3ForCausalLM": ("engine.models.deepseek_v3", "DeepseekV3"),
    "NanoChatForCausalLM": ("engine.models.nanochat", "NanoChat"),
}
# Served instead if config.json has null as `vision_config`: see `with_image_processor`.
TEXT_HALVES = {
    "Gemma3ForConditionalGeneration": DECODERS["Gemma3ForCausalLM"],
    "Gemma4ForConditionalGeneration": DECODERS["Gemma4ForCausalLM"],
    "Qwen3_5ForConditionalGeneration": DECODERS["Qwen3_5ForCausalLM"],
    "Qwen3_5MoeForConditionalGeneration": DECODERS["Qwen3_5MoeForCausalLM"],
}
# Decoders without a head, whose tensors lack the beginning "model.".
TRUNKS = {
    "LlamaModel": DECODERS["LlamaForCausalLM"],
    "MistralModel": DECODERS["MistralForCausalLM"],
    "Qwen2Model": DECODERS["Qwen2ForCausalLM"],
    "Qwen3Model": DECODERS["Qwen3ForCausalLM"],
    "Gemma2Model": DECODERS["Gemma2ForCausalLM"],
}
CLASSIFIER = "ForSequenceClassification"
ENDINGS = (CLASSIFIER, "ForConditionalGeneration", "ForCausalLM", "ForMaskedLM", "Model")
# Decoders with a head that gives logits of labels.
DECODER_CLASSIFIERS = {
    name + CLASSIFIER: ("engine.models.decoder_classifiers", f"{name}Classifier")
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
ENCODERS = {
    "BertModel": ("engine.models.bert", "Bert"),
    "BertForMaskedLM": ("engine.models.bert", "Bert"),
    "BertForPreTraining": ("engine.models.bert", "Bert"),
    **dict.fromkeys(
        [
            *("RobertaModel", "RobertaForMaskedLM"),
            *("XLMRobertaModel", "XLMRobertaForMaskedLM"),
            *("CamembertModel", "CamembertForMaskedLM"),
        ],
        ("engine.models.roberta", "Roberta"),
    ),
    "DistilBertModel": ("engine.models.distilbert", "DistilBert"),
    "DistilBertForMaskedLM": ("engine.models.distilbert", "DistilBert"),
    "MPNetModel": ("engine.models.mpnet", "MPNet"),
    "MPNetForMaskedLM": ("engine.models.mpnet", "MPNet"),
    "NomicBertModel": ("engine.models.nomic_bert", "NomicBert"),
    "NomicBertForMaskedLM": ("engine.models.nomic_bert", "NomicBert"),
    "GteModel": ("engine.models.gte", "Gte"),
    "GteForMaskedLM": ("engine.models.gte", "Gte"),
    "JinaEmbeddingsV3Model": ("engine.models.jina_v3", "JinaV3"),
    "JinaEmbeddingsV3ForMaskedLM": ("engine.models.jina_v3", "JinaV3"),
    "ModernBertModel": ("engine.models.modernbert", "ModernBert"),
    "ModernBertForMaskedLM": ("engine.models.modernbert", "ModernBert"),
    "Gemma3TextModel": ("engine.models.embedding_gemma", "EmbeddingGemma"),
    "BertForSequenceClassification": ("engine.models.bert", "BertClassifier"),
    "DistilBertForSequenceClassification": ("engine.models.distilbert", "DistilBertClassifier"),
    "GteForSequenceClassification": ("engine.models.gte", "GteClassifier"),
    "ModernBertForSequenceClassification": ("engine.models.modernbert", "ModernBertClassifier"),
    "MPNetForSequenceClassification": ("engine.models.mpnet", "MPNetClassifier"),
    **dict.fromkeys(
        [
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
            "CamembertForSequenceClassification",
        ],
        ("engine.models.roberta", "RobertaClassifier"),
    ),
    "RoFormerModel": ("engine.models.roformer", "RoFormer"),
    "RoFormerForMaskedLM": ("engine.models.roformer", "RoFormer"),
}
ENCODER_DECODERS = {
    "MarianMTModel": ("engine.models.marian", "Marian"),
    "T5ForConditionalGeneration": ("engine.models.t5", "T5"),
}
# Classes in published checkpoints that became part of transformers, our reference.
KNOWN_CODE = {
    "Phi3ForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    "DeepseekV2ForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    "NomicBertModel": "modeling_hf_nomic_bert.NomicBertModel",
}
CAUSAL = DECODERS | TRUNKS | DECODER_CLASSIFIERS
ARCHITECTURES: dict[str, tuple[ModelKind, str, str]] = {
    **{name: ("decoder", *where) for name, where in CAUSAL.items()},
    **{name: ("encoder", *where) for name, where in ENCODERS.items()},
    **{name: ("encoder-decoder", *where) for name, where in ENCODER_DECODERS.items()},
}


def model_class(config: dict[str, Any]) -> tuple[str, ModelKind, Any]:
    """Return (architecture, kind, class) for a config.json.

    Raises ConfigError, listing the supported architectures, if none of them is named. Checkpoints
    with their own code (`auto_map`) are refused, unless it is KNOWN_CODE: it may compute something
    else than our model of that name.
    """
    given = config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    code = config.get("auto_map")
    if code and not _is_known(code, names):
        raise ConfigError(
            f"config.json has auto_map {code}, which requires code from the checkpoint; such code "
            "is never run. If the weights are those of a supported architecture "
            f"({_supported()}), name it in architectures and remove auto_map."
        )
    for name in names:
        if name in ARCHITECTURES:
            kind, module, attribute = ARCHITECTURES[name]
            if name in TEXT_HALVES and config.get("vision_config", {}) is None:
                module, attribute = TEXT_HALVES[name]
            return name, kind, getattr(import_module(module), attribute)
    raise ConfigError(
        f"Architecture {listed(names) or '(none given)'} is not served; supported: {_supported()}."
    )


def _supported() -> str:
    """Return the names of all architectures, grouped by the endings that many have in common."""
    groups: dict[str, list[str]] = {ending: [] for ending in (*ENDINGS, "")}
    for name in sorted(ARCHITECTURES):
        ending = next(each for each in groups if name.endswith(each))
        groups[ending].append(name.removesuffix(ending))
    shared = [f"with {ending}: {', '.join(groups[ending])}" for ending in ENDINGS]
    return "; ".join([", ".join(groups[""]), *shared])


def _is_known(code: Any, names: list[str]) -> bool:
    """Whether `auto_map` gives the first architecture the class that transformers has too."""
    if not isinstance(code, dict) or not names:
        return False
    source = code.get("AutoModel" if names[0] in ENCODERS else "AutoModelForCausalLM")
    if not isinstance(source, str):
        return False
    _, _, place = source.rpartition("--")  # after the repository that has the code
    return KNOWN_CODE.get(names[0]) == place
