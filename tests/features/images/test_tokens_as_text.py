"""A text that happens to spell the image token is a text, whoever wrote it."""

import pytest

from nanovllm import LLM, SamplingParams
from tests.image_checkpoints import make_image_checkpoint, picture

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SHOWN = {"type": "image_pil", "image_pil": picture(60, 40)}


@pytest.fixture(scope="module", params=["smolvlm", "idefics3", "qwen3_vl", "qwen3_5"])
def llm(request, tmp_path_factory):
    folder = make_image_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=400, max_model_len=512)


@pytest.fixture
def token(llm) -> str:
    return llm.get_tokenizer().convert_ids_to_tokens(llm.engine.model_config.images.image_token_id)


def texts(llm, prompt_token_ids: list[int]) -> str:
    """Between pictures."""
    image_token_id = llm.engine.model_config.images.image_token_id
    kept = [token_id for token_id in prompt_token_ids if token_id != image_token_id]
    return llm.get_tokenizer().decode(kept, skip_special_tokens=False)


@pytest.mark.parametrize("words", ["{}", "{0}{0}", "what is {} here", " {} ", "a\n{0}\n{0}b", "<{}>", "<im{}age>"])
def test_words_around_a_picture(words, llm, token):
    """Before it, after it, in an answer, in a system message: as many placeholders as without, and all the words."""
    words = words.format(token)

    def conversation(text: str) -> list[dict]:
        return [
            {"role": "system", "content": f"you are {text}"},
            {"role": "user", "content": [{"type": "text", "text": text}, SHOWN, {"type": "text", "text": text}]},
            {"role": "assistant", "content": f"it is {text}"},
            {"role": "user", "content": f"and {text}?"},
        ]

    image_token_id = llm.engine.model_config.images.image_token_id
    [plain, odd] = llm.chat([conversation("fox"), conversation(words)], GREEDY, use_tqdm=False)
    assert odd.prompt_token_ids.count(image_token_id) == plain.prompt_token_ids.count(image_token_id) > 0
    assert texts(llm, odd.prompt_token_ids) == texts(llm, plain.prompt_token_ids).replace("fox", words)
    assert odd.prompt.count(token) == plain.prompt.count(token) + words.count(token) * 5


def test_words_without_a_picture(llm, token):
    [output] = llm.chat([{"role": "user", "content": f"the token {token} of the model"}], GREEDY, use_tqdm=False)
    assert llm.engine.model_config.images.image_token_id not in output.prompt_token_ids
    assert f"the token {token} of the model" in texts(llm, output.prompt_token_ids)


def test_a_chat_goes_on_after_its_model_has_written_the_token(llm, token):
    """Turn after turn, with what is cached of the turns before."""
    messages = [{"role": "user", "content": [SHOWN, {"type": "text", "text": "what is it"}]}]
    for turn in range(3):
        [output] = llm.chat(messages, GREEDY, use_tqdm=False)
        assert turn == 0 or output.num_cached_tokens > 0
        messages.append({"role": "assistant", "content": f"{output.outputs[0].text} {token}"})
        messages.append({"role": "user", "content": f"{token} again"})


def test_a_last_message_that_goes_on(llm, token):
    messages = [{"role": "user", "content": [SHOWN]}, {"role": "assistant", "content": f"it is {token} and"}]
    options = dict(add_generation_prompt=False, continue_final_message=True)
    [output] = llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert output.prompt.endswith(f"it is {token} and")


def test_a_prompt_of_ones_own_says_where_its_pictures_are(llm, token):
    """In generate() the text is the caller's own, and the token in it is a picture's place."""
    prompt = {"prompt": f"{token} and {token}", "multi_modal_data": {"image": picture(60, 40)}}
    with pytest.raises(ValueError, match="found 2 for 1"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
