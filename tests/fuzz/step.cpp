// Whole decode steps: a search, and attention to what it finds and to the window.
#include "search_case.h"
#include "numbers.h"

namespace {

// Multiplications that the plain arithmetic of one request may take for its ids.
constexpr int64_t kWork = 1000000;

class StepCase {
  public:
    explicit StepCase(Random &random) {
        hfk_request &r = step_.attention;
        pick_shape(random);
        step_.search_kind = static_cast<int32_t>(random.pick(HFK_SEARCH_NONE, HFK_SEARCH_LISTS));
        if (step_.search_kind == HFK_SEARCH_NONE || step_.search_kind == HFK_SEARCH_PROXY) {
            r.id_heads = r.kv_heads * (r.query_heads / r.kv_heads % 2 == 0 ? random.pick(1, 2) : 1);
        }
        if (step_.search_kind == HFK_SEARCH_NONE) {
            step_.tokens = random.pick(0, 300);
        } else {
            search_ = make_search_case(random, step_);
            step_.search = search_->request();
        }
        const int64_t most = kWork / (r.batch * r.query_heads * r.queries * (r.key_dim + r.value_dim));
        const int64_t count = random.one_in(8) ? step_.tokens + random.pick(0, 3)
                                               : random.pick(1, std::max<int64_t>(step_.tokens, 1));
        r.count = std::min(count, most);
        // Some queries are 0: all scores are then equal.
        query_ = Numbers(r.batch * r.query_heads * r.queries * r.key_dim, r.dtype);
        query_.fill(random, random.one_in(10) ? 0 : 40);
        r.query = query_.data();
        valid_ = make_valid(random, r.batch, step_.tokens, step_.valid_stride);
        step_.valid = valid_.get();
        make_rows(random);
        make_ids(random);
        make_window(random);
        sinks_ = Numbers(r.query_heads, HFK_FLOAT32);
        sinks_.fill(random);
        if (random.one_in(2)) step_.sink_logits = sinks_.floats();
        if (random.one_in(2)) step_.selected = &selected_;
        const float poison = std::numeric_limits<float>::quiet_NaN();
        out_.assign(r.batch * r.query_heads * r.queries * r.value_dim, poison);
        lse_.assign(r.batch * r.query_heads * r.queries, poison);
        r.out = out_.data();
        if (random.one_in(2)) {
            result_.reset(new char[out_.size() * (r.dtype == HFK_FLOAT32 ? 4 : 2)]);
            step_.result = result_.get();
            r.out = nullptr;
        }
        if (random.one_in(2)) r.lse = lse_.data();
    }

    const char *run() {
        const bool search_fails = search_ != nullptr && search_->leads_astray(step_);
        if (search_fails) {
            if (hfk_search_ids(&step_, nullptr) != HFK_BAD_ID) return "status of hfk_search_ids";
            return hfk_run_step(&step_) == HFK_BAD_ID ? nullptr : "status of hfk_run_step";
        }
        if (search_ != nullptr) {
            const auto key = [this](int64_t batch, int64_t head, int64_t token, int64_t dim) {
                return key_number(batch, head, token, dim);
            };
            const char *fault = search_->run(step_, query_, key);
            if (fault != nullptr) return fault;
        }
        const std::vector<int32_t> ids = ids_;
        if (search_ != nullptr) std::fill(ids_.begin(), ids_.end(), -7);
        const int32_t status = hfk_run_step(&step_);
        if (ids_ != ids) return "ids of hfk_run_step";
        if (status != (leads_astray() ? HFK_BAD_ID : HFK_OK)) return "status of hfk_run_step";
        if (status == HFK_BAD_ID) return nullptr;
        const int64_t holes = std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id < 0; });
        const int64_t chosen = static_cast<int64_t>(ids.size()) - holes;
        if (selected_ != kSelected + (step_.selected == nullptr ? 0 : chosen)) return "selected";
        const hfk_request &r = step_.attention;
        return first_fault(r.batch, r.query_heads, r.queries, [this](int64_t b, int64_t h, int64_t q) {
            return is_attention(b, h, q) ? nullptr : "attention of hfk_run_step";
        });
    }

  private:
    static constexpr int64_t kSelected = 1000;

    void pick_shape(Random &random) {
        hfk_request &r = step_.attention;
        const auto pick_dim = [&random] {
            return random.one_in(2) ? int64_t{8} << random.pick(0, 5) : random.pick(1, 140);
        };
        r.batch = random.pick(1, 2);
        r.kv_heads = r.id_heads = random.pick(1, 3);
        r.query_heads = r.kv_heads * random.pick(1, 9);
        r.queries = random.one_in(2) ? 1 : random.pick(1, 4);
        r.key_dim = pick_dim();
        r.value_dim = random.one_in(2) ? r.key_dim : pick_dim();
        value_in_key_ = random.one_in(4);
        if (value_in_key_) r.value_dim = random.pick(1, r.key_dim);
        r.value_start = value_in_key_ ? 0 : r.key_dim;
        r.row_dim = r.value_start + (value_in_key_ ? r.key_dim : r.value_dim);
        r.scale = random.one_in(3) ? 0.1 : 1.0 / std::sqrt(static_cast<double>(r.key_dim));
        if (random.one_in(10)) r.scale = -r.scale;
        r.softcap = random.one_in(3) ? (random.one_in(2) ? 1.5 : 30.0) : 0.0;
        r.dtype = static_cast<int32_t>(random.pick(0, 2));
        r.path = random.path();
        r.threads = static_cast<int32_t>(random.pick(1, 8));
    }

    // [batch, count] of exactly that size, with room between batch rows or without.
    static std::unique_ptr<uint8_t[]> make_valid(Random &random, int64_t batch, int64_t count,
                                                 int64_t &stride) {
        stride = count + (random.one_in(2) ? 0 : random.pick(0, 9));
        const int64_t size = (batch - 1) * stride + count;
        std::unique_ptr<uint8_t[]> valid(new uint8_t[size]);
        const int64_t eighths[] = {8, 7, 4, 1, 0};
        const int64_t share = eighths[random.pick(0, 4)];
        for (int64_t i = 0; i < size; ++i) valid[i] = random.pick(1, 8) <= share;
        return valid;
    }

    // Few pages, which many entries of the table name. Some tables are too short or have gaps.
    void make_rows(Random &random) {
        hfk_request &r = step_.attention;
        r.page_len = random.one_in(2) ? int64_t{1} << random.pick(0, 6) : random.pick(1, 9);
        r.max_pages = (step_.tokens + r.page_len - 1) / r.page_len + random.pick(0, 2);
        const bool astray = random.one_in(8);
        if (astray && random.one_in(2)) r.max_pages /= 2;
        // All that the table has room for, or the tokens that there are, or fewer.
        r.tokens = r.max_pages * r.page_len;
        if (random.one_in(2)) r.tokens = std::min(r.tokens, step_.tokens);
        if (astray && random.one_in(2)) r.tokens = random.pick(0, r.tokens);
        r.page_count = random.pick(1, 4);
        for (int64_t page = 0; page < r.page_count; ++page) {
            rows_.emplace_back(r.kv_heads * r.page_len * r.row_dim, r.dtype);
            rows_.back().fill(random);
            pages_.push_back(reinterpret_cast<int64_t>(rows_.back().data()));
        }
        table_.resize(r.batch * r.max_pages);
        for (int32_t &page : table_) {
            page = static_cast<int32_t>(random.pick(0, r.page_count - 1));
            if (astray && random.one_in(20)) {
                page = random.one_in(2) ? -1 : static_cast<int32_t>(r.page_count);
            }
        }
        r.table = table_.data();
        r.pages = pages_.data();
    }

    void make_ids(Random &random) {
        hfk_request &r = step_.attention;
        ids_.assign(r.batch * r.id_heads * r.queries * r.count, -7);
        for (int32_t &id : ids_) {
            if (search_ != nullptr) break;
            const bool hole = step_.tokens == 0 || random.one_in(4);
            id = hole ? -1 : static_cast<int32_t>(random.pick(0, step_.tokens - 1));
        }
        if (search_ == nullptr && !ids_.empty() && random.one_in(6)) {
            ids_[random.pick(0, static_cast<int64_t>(ids_.size()) - 1)] = wrong_id(random, r.tokens);
        }
        r.ids = ids_.data();
    }

    void make_window(Random &random) {
        const hfk_request &r = step_.attention;
        hfk_window &window = step_.window;
        const int64_t kind = random.pick(0, 5);
        window.length = kind == 0 ? 0
                                  : r.queries + (kind < 3   ? random.pick(0, 3)
                                                 : kind < 5 ? random.pick(0, 130)
                                                            : random.pick(200, 700));
        window.capacity = window.length + (random.one_in(2) ? 0 : random.pick(0, 20));
        const int64_t heads = r.batch * r.kv_heads;
        keys_ = Numbers(heads * window.capacity * r.key_dim, r.dtype);
        values_ = Numbers(heads * window.capacity * r.value_dim, r.dtype);
        // What lies behind the rows held stays NaN.
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t first = h * window.capacity;
            keys_.fill(random, first * r.key_dim, window.length * r.key_dim);
            values_.fill(random, first * r.value_dim, window.length * r.value_dim);
        }
        window.keys = keys_.data();
        window.values = value_in_key_ ? keys_.data() : values_.data();
        window.value_row = value_in_key_ ? r.key_dim : r.value_dim;
        near_valid_ = make_valid(random, r.batch, window.length, window.valid_stride);
        if (random.one_in(2)) window.valid = near_valid_.get();
    }

    // The page of an id; -1 where it leads to no row.
    int64_t page_of(int64_t batch, int32_t id) const {
        const hfk_request &r = step_.attention;
        if (id < 0 || id >= r.tokens) return -1;
        const int32_t page = table_[batch * r.max_pages + id / r.page_len];
        return page < r.page_count ? page : -1;
    }

    double key_number(int64_t batch, int64_t head, int64_t token, int64_t dim) const {
        const hfk_request &r = step_.attention;
        const int64_t page = page_of(batch, static_cast<int32_t>(token));
        if (page < 0) return std::numeric_limits<double>::quiet_NaN();
        const int64_t row = (head * r.page_len + token % r.page_len) * r.row_dim;
        return rows_[page][row + dim];
    }

    bool leads_astray() const {
        const int64_t per_row = static_cast<int64_t>(ids_.size()) / step_.attention.batch;
        for (size_t i = 0; i < ids_.size(); ++i) {
            if (ids_[i] != -1 && page_of(i / per_row, ids_[i]) < 0) return true;
        }
        return false;
    }

    bool is_attention(int64_t b, int64_t h, int64_t q) const {
        const hfk_request &r = step_.attention;
        const hfk_window &window = step_.window;
        const int64_t index = (b * r.query_heads + h) * r.queries + q;
        const int64_t id_head = h / (r.query_heads / r.id_heads);
        const int64_t kv_head = h / (r.query_heads / r.kv_heads);
        PlainAttention attention(r.value_dim);
        const auto add = [&](const Numbers &keys, int64_t key, const Numbers &values,
                             int64_t value) {
            double score = 0.0;
            for (int64_t d = 0; d < r.key_dim; ++d) {
                score += query_[index * r.key_dim + d] * keys[key + d];
            }
            attention.add(capped(score * r.scale, r.softcap),
                          [&](int64_t d) { return values[value + d]; });
        };
        const int64_t after = r.queries - 1 - q;
        for (int64_t row = 0; row < window.length - after; ++row) {
            if (window.valid != nullptr && !window.valid[b * window.valid_stride + row]) continue;
            const int64_t place = (b * r.kv_heads + kv_head) * window.capacity + row;
            add(keys_, place * r.key_dim, value_in_key_ ? keys_ : values_, place * window.value_row);
        }
        const int32_t *chosen = r.ids + ((b * r.id_heads + id_head) * r.queries + q) * r.count;
        for (int64_t k = 0; k < r.count; ++k) {
            if (chosen[k] < 0) continue;
            const Numbers &page = rows_[page_of(b, chosen[k])];
            const int64_t row = (kv_head * r.page_len + chosen[k] % r.page_len) * r.row_dim;
            add(page, row, page, row + r.value_start);
        }
        if (r.lse != nullptr && !is_near(lse_[index], attention.lse())) return false;
        const double sink = step_.sink_logits == nullptr ? 0.0 : std::exp(sinks_[h]);
        for (int64_t d = 0; d < r.value_dim; ++d) {
            const double error = weight_error(r) * attention.size(d);
            if (!is_result(index * r.value_dim + d, attention.mean(d, sink), error)) return false;
        }
        return true;
    }

    // A result has 8 significant bits in bfloat16, 11 in float16.
    bool is_result(int64_t place, double want, double error) const {
        if (step_.result == nullptr) return is_near(out_[place], want, error);
        const int32_t dtype = step_.attention.dtype;
        const double got = number_at(step_.result, dtype, place);
        const double bits = dtype == HFK_FLOAT32 ? 24 : dtype == HFK_FLOAT16 ? 11 : 8;
        return is_near(got, want, error) ||
               std::abs(got - want) < 1e-4 + error + std::ldexp(std::abs(want), -bits);
    }

    // Scores of up to some hundred have an error of some 1e-5 in fp32, and so have their weights.
    static bool is_near(double got, double want, double error = 0.0) {
        return got == want || std::abs(got - want) < error + 1e-4 * (1.0 + std::abs(want));
    }

    hfk_step step_{};
    std::unique_ptr<SearchCase> search_;
    Numbers query_, keys_, values_, sinks_;
    std::vector<Numbers> rows_; // of each page
    std::vector<int32_t> ids_, table_;
    std::vector<int64_t> pages_;
    std::unique_ptr<uint8_t[]> valid_, near_valid_;
    std::vector<float> out_, lse_;
    std::unique_ptr<char[]> result_;
    int64_t selected_ = kSelected;
    bool value_in_key_ = false;
};

} // namespace

const char *fuzz_step(Random &random) { return StepCase(random).run(); }
