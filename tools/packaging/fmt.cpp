// Compiles fmt into an installed binary, in the place of Debian's libfmt.so.

#include <locale>

#include <fmt/format-inl.h>

// These are the templates that fmt's headers declare as compiled elsewhere, for the types that Tessera formats.
namespace fmt {
template auto detail::locale_ref::get<std::locale>() const -> std::locale;
template auto detail::thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template auto detail::decimal_point_impl<char>(locale_ref) -> char;
template auto detail::dragonbox::to_decimal<float>(float) noexcept -> dragonbox::decimal_fp<float>;
template auto detail::dragonbox::to_decimal<double>(double) noexcept -> dragonbox::decimal_fp<double>;
}  // namespace fmt
